"""One process at a time in a directory; the lock is the operating system's, so a crash leaves none behind."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from rlzoo.errors import UserError

FILE = ".lock"

logger = logging.getLogger("rlzoo")


class Lock:
    """Held from when it is made until it is released, or its process ends.

    The directory itself is locked, so removing the file changes nothing; the file names the process that holds the lock, and is
    locked instead on file systems that lock files only, such as NFS.
    """

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        """Take the lock, and give whoever has it so many seconds to release it.

        Raises:
            UserError: another process has it.
        """
        self._folder, until = folder, time.monotonic() + seconds
        self._opened = {folder: os.open(folder, os.O_RDONLY)}
        try:
            with contextlib.suppress(OSError):  # a full disk, or one that cannot be written
                self._opened[folder / FILE] = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
            self._locked = next((path for path in self._opened if self._take(path, until)), None)
            if self._locked is None:
                logger.warning("%s cannot be locked: see that no second process writes there", folder)
            with contextlib.suppress(OSError, KeyError):
                os.truncate(self._opened[folder / FILE], 0)
                os.pwrite(self._opened[folder / FILE], f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise

    def check(self) -> None:
        """Make sure that what was locked is still there.

        Raises:
            UserError: it was moved, or replaced by another.
        """
        for path in (self._folder, self._locked or self._folder):
            if not _is_at(self._opened[path], path):
                raise UserError(f"{str(path)!r} was moved or replaced while it was in use; put it back")

    def release(self) -> None:
        """Let others in."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def _take(self, path: Path, until: float) -> bool:
        """Whether it could be locked; False for a file system without such locks."""
        while True:
            try:
                fcntl.flock(self._opened[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    holder = f"directory {str(self._folder)!r} is in use by process {self._holder()}"
                    raise UserError(f"{holder}; stop it, or wait for its end") from error
                time.sleep(0.1)
            except OSError:
                return False

    def _holder(self) -> str:
        try:
            return (self._folder / FILE).read_text(encoding="utf-8")[:20].strip() or "unknown"
        except (OSError, ValueError):
            return "unknown"


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to what was opened."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
