"""An exclusive lock on a directory, which the operating system releases if the process crashes."""

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
    """An exclusive lock on a directory, held from construction until `release` or the end of the process.

    The directory itself is locked, so that removing the lock file has no effect. The lock file contains the id of the process
    that holds the lock. On file systems that can lock only files, such as NFS, the lock file is locked instead of the
    directory.
    """

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        """Acquire the lock, waiting up to ``seconds`` for another process to release it.

        Raises:
            UserError: another process holds the lock.
        """
        self._folder, until = folder, time.monotonic() + seconds
        self._opened = {folder: os.open(folder, os.O_RDONLY)}
        try:
            with contextlib.suppress(OSError):  # a full or read-only disk
                self._opened[folder / FILE] = os.open(folder / FILE, os.O_RDWR | os.O_CREAT, 0o666)
            if not any(self._take(path, until) for path in self._opened):
                logger.warning("%s cannot be locked; make sure that no other process writes there", folder)
            with contextlib.suppress(OSError, KeyError):
                os.truncate(self._opened[folder / FILE], 0)
                os.pwrite(self._opened[folder / FILE], f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock."""
        while self._opened:
            os.close(self._opened.popitem()[1])

    def _take(self, path: Path, until: float) -> bool:
        """Try to lock a path; return False if the file system cannot lock it."""
        while True:
            try:
                fcntl.flock(self._opened[path], fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError as error:
                if time.monotonic() >= until:
                    holder = f"directory {str(self._folder)!r} is in use by process {self._holder()}"
                    raise UserError(f"{holder}; stop it, or wait until it ends") from error
                time.sleep(0.1)
            except OSError:
                return False

    def _holder(self) -> str:
        try:
            return (self._folder / FILE).read_text(encoding="utf-8")[:20].strip() or "unknown"
        except (OSError, ValueError):
            return "unknown"
