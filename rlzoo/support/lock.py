"""An exclusive lock on a directory, which the operating system releases if the process crashes."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from pathlib import Path

from rlzoo.core.errors import UserError

FILE = ".lock"

logger = logging.getLogger("rlzoo")


class Lock:
    """An exclusive lock on a directory, held from construction until `release` or the end of the process.

    The locked file is ``.lock`` in the directory. It contains the ID of the process that holds the lock.
    """

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        """Acquire the lock, waiting up to ``seconds`` for another process to release it.

        Raises:
            UserError: another process holds the lock.
            OSError: the lock file cannot be written.
        """
        until = time.monotonic() + seconds
        self._descriptor: int | None = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        while not _take(self._descriptor, folder):
            if time.monotonic() >= until:
                holder = os.pread(self._descriptor, 20, 0).decode(errors="replace").strip() or "unknown"
                self.release()
                raise UserError(f"directory {str(folder)!r} is in use by process {holder}; stop it, or wait until it ends")
            time.sleep(0.1)
        with contextlib.suppress(OSError):  # the disk may be full
            os.truncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def is_locked(folder: Path) -> bool:
    """Return whether another process holds the lock on a directory, without writing to the directory."""
    try:
        descriptor = os.open(folder / FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)  # any other error means that the file system has no locks
    finally:
        os.close(descriptor)
    return False


def _take(descriptor: int, folder: Path) -> bool:
    """Try to lock a file, and return False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        logger.warning("%s cannot be locked; make sure that no other process writes there", folder)
    return True
