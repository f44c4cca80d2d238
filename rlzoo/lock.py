"""One process at a time in a directory; the lock is the operating system's, so a crash leaves none behind."""

from __future__ import annotations

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

    Example:
        ``lock = Lock(Path("runs/mine"))``; a second one raises, in this process and in any other.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            UserError: another process has it.
        """
        import fcntl

        self._file = (folder / FILE).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise UserError(f"directory {str(folder)!r} is in use by process {holder}; stop it, or wait for its end") from error
        except OSError as error:  # a file system without locks
            logger.warning("%s cannot be locked (%s): see that no second process writes there", folder, error.strerror)
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

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
        self._file.close()
