"""A reply is read only up to a size and a time limit, regardless of what the server sends."""

import time

import pytest
from urllib3.exceptions import HTTPError

from rlzoo.support.replies import bounded_pool
from tests.journal.tracking import hostile

LARGE = [
    hostile.endless_body, hostile.claimed_size, hostile.claimed_chunk, hostile.endless_headers, hostile.endless_header,
    hostile.endless_continue,
]  # fmt: skip
SLOW = [hostile.dripping_body, hostile.dripping_headers, hostile.silence]


@pytest.mark.parametrize("attack", [*LARGE, *SLOW], ids=lambda attack: attack.__name__)
def test_an_endless_or_dripping_reply_ends_with_an_error(attack):
    with hostile.serving(attack) as address:
        started = time.monotonic()
        with pytest.raises(HTTPError):
            bounded_pool(address, 2**20, 1.0, retries=False, timeout=60).request("GET", "/")
        assert time.monotonic() - started < 10


def test_a_reply_says_what_it_was_too_much_of():
    large, slow = (pytest.raises(HTTPError, match=words) for words in ("larger than 1 MiB", r"timed out|longer than 0.5 s"))
    with hostile.serving(hostile.endless_body) as address, large:
        bounded_pool(address, 2**20, 60, retries=False, timeout=60).request("GET", "/")
    with hostile.serving(hostile.dripping_body) as address, slow:
        bounded_pool(address, 2**20, 0.5, retries=False, timeout=60).request("GET", "/")


seen = set()


def whole(connection, request):
    seen.add(connection.getpeername())
    connection.sendall(hostile.OK + b"Content-Length: 300000\r\n\r\n" + b"x" * 300_000)


def test_an_ordinary_reply_is_whole_and_its_connection_is_used_again():
    seen.clear()
    with hostile.serving(whole) as address:
        pool = bounded_pool(address, 2**20, 5.0)
        for _ in range(5):  # more than the limit in total, but each within it
            assert pool.request("GET", "/").data == b"x" * 300_000
        assert len(seen) == 1
