"""One process at a time in a directory; the lock is the operating system's, so a crash leaves none behind."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Self

from rlzoo.errors import UserError

FILE = ".lock"

logger = logging.getLogger("rlzoo")


class Lock:
    """Held from when it is made until it is released, or its process ends.

    The directory itself is locked, so removing the file changes nothing; the file names the process that holds the lock, and is
    locked too for file systems that lock files only, such as NFS.

    Example:
        ``lock = Lock(Path("runs/mine"))``; a second one raises, in this process and in any other.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            UserError: another process has it.
        """
        self._path = folder
        self._folder = os.open(folder, os.O_RDONLY)
        self._file: int | None = None
        try:
            self._locks_folder = self._take(self._folder)
            self._lock_file()
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Make sure that the directory is still the one that was locked.

        Raises:
            UserError: it was moved, or replaced by another; or its lock file was removed and another process holds a new one.
        """
        if not _is_at(self._folder, self._path):
            raise UserError(f"directory {str(self._path)!r} was moved or replaced while it was in use; put it back")
        if not self._locks_folder and (self._file is None or not _is_at(self._file, self._path / FILE)):
            self._lock_file()

    @classmethod
    def wait_for(cls, folder: Path, seconds: float) -> Self:
        """Take the lock, and give whoever has it so many seconds to release it.

        Raises:
            UserError: another process still has it.
        """
        until = time.monotonic() + seconds
        while True:
            try:
                return cls(folder)
            except UserError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def release(self) -> None:
        """Let others in."""
        for descriptor in (self._folder, self._file):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._folder, self._file = -1, None

    def _lock_file(self) -> None:
        """Write the process's number into the lock file, and lock it where the directory cannot be locked."""
        try:
            file = os.open(self._path / FILE, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:  # a full disk, or one that cannot be written
            if not self._locks_folder:
                logger.warning("%s cannot be locked (%s): see that no second process writes there", self._path, error.strerror)
            return
        try:
            if not self._locks_folder and not self._take(file):
                logger.warning("%s cannot be locked: see that no second process writes there", self._path)
            with contextlib.suppress(OSError):
                os.truncate(file, 0)
                os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(file)
            raise
        if self._file is not None:
            os.close(self._file)
        self._file = file

    def _take(self, descriptor: int) -> bool:
        """Whether it could be locked; False for a file system without such locks."""
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"directory {str(self._path)!r} is in use by process {self._holder()}; stop it, or wait for its end"
            ) from error
        except OSError:
            return False
        return True

    def _holder(self) -> str:
        try:
            return (self._path / FILE).read_text(encoding="utf-8")[:20].strip() or "unknown"
        except (OSError, ValueError):
            return "unknown"


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
