"""Limits the size and duration of HTTP replies.

The timeout of an HTTP library restarts with every byte, and the size of a reply is unlimited. A server that sends one byte per
second, or never stops sending, could therefore block a process forever or use all of its memory.
"""

from __future__ import annotations

import io
import socket
import time
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urllib3 import HTTPConnectionPool


class ReplyTooLargeError(OSError):
    """Raised when a server's reply exceeds the size limit."""


def bounded_reply(largest: int, longest: float) -> type[HTTPResponse]:
    """Return a class for ``HTTPConnection.response_class`` that limits replies, including headers.

    Args:
        largest: maximum size of a reply in bytes.
        longest: maximum seconds from the end of the request to the end of the reply.
    """

    class BoundedReply(HTTPResponse):
        def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
            super().__init__(sock, *args, **kwargs)
            self.fp = _Buffered(_Bounded(sock, self.fp, largest, longest))

    return BoundedReply


def bounded_pool(address: str, largest: int, longest: float, **settings: Any) -> HTTPConnectionPool:
    """Return a urllib3 connection pool with limited replies; ``settings`` are passed to the pool."""
    from urllib3 import connection_from_url

    pool = connection_from_url(address, **settings)
    bounded: Any = type("BoundedConnection", (pool.ConnectionCls,), {"response_class": bounded_reply(largest, longest)})
    pool.ConnectionCls = bounded
    return pool


class _Bounded(io.RawIOBase):
    """A socket's file object that raises an error when the size or time limit is exceeded."""

    def __init__(self, sock: socket.socket, file: io.BufferedIOBase, largest: int, longest: float) -> None:
        self._sock, self._file = sock, file
        self.largest, self._left = largest, largest
        self._longest, self._until = longest, time.monotonic() + longest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        seconds = self._until - time.monotonic()
        if seconds <= 0:
            raise TimeoutError(f"the reply took longer than {self._longest:g} s")
        timeout = self._sock.gettimeout()
        self._sock.settimeout(seconds if timeout is None else min(timeout, seconds))
        number = self._file.readinto1(buffer)
        self._left -= number
        if self._left < 0:
            raise self.error()
        return number

    def error(self) -> ReplyTooLargeError:
        return ReplyTooLargeError(f"the reply is larger than {self.largest / 2**20:g} MiB")

    def close(self) -> None:
        self._file.close()
        super().close()


class _Buffered(io.BufferedReader):
    """Rejects oversized reads before allocating memory, because a server can announce any size."""

    raw: _Bounded

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self.raw.largest:
            raise self.raw.error()
        return super().read(size)
