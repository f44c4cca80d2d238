"""Bounds on the replies of HTTP servers: how many bytes are read, and for how long.

The timeout of an HTTP library counts from one byte to the next, and it reads a reply of any size. A server that sends a byte
a second, or never stops sending, would hold a process for ever or take all of its memory.
"""

from __future__ import annotations

import io
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urllib3 import HTTPConnectionPool


class ReplyTooLargeError(OSError):
    """A server sent more than was asked of it."""


def bounded_reply(largest: int, longest: float) -> type[HTTPResponse]:
    """Return a class for ``HTTPConnection.response_class`` whose replies are bounded, headers included.

    Args:
        largest: bytes of a reply.
        longest: seconds from the end of the request to the end of the reply.
    """

    class BoundedReply(HTTPResponse):
        def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
            super().__init__(sock, *args, **kwargs)
            self.fp = _Buffered(_Bounded(sock, self.fp, largest, longest))

    return BoundedReply


@contextmanager
def bounded_replies(largest: int, longest: float) -> Iterator[None]:
    """Bound the replies that this process reads through urllib3, and so through requests, within the block."""
    from urllib3.connection import HTTPConnection

    former = HTTPConnection.response_class
    HTTPConnection.response_class = bounded_reply(largest, longest)
    try:
        yield
    finally:
        HTTPConnection.response_class = former


def bounded_pool(address: str, largest: int, longest: float, **settings: Any) -> HTTPConnectionPool:
    """Return urllib3's pool of connections to a server, with bounded replies; ``settings`` are those of the pool."""
    from urllib3 import connection_from_url

    pool = connection_from_url(address, **settings)
    bounded: Any = type("BoundedConnection", (pool.ConnectionCls,), {"response_class": bounded_reply(largest, longest)})
    pool.ConnectionCls = bounded
    return pool


class _Bounded(io.RawIOBase):
    """A socket's file that raises once too much was read, or the time is up."""

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
    """Refuses a size before memory is set aside for it: servers claim any."""

    raw: _Bounded

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > self.raw.largest:
            raise self.raw.error()
        return super().read(size)
