"""A reply is read only up to a size and a time limit, regardless of what the server sends."""

import time

import pytest
import requests
import urllib3
from urllib3.exceptions import HTTPError

from rlzoo.support.replies import bounded_pool, bounded_replies
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
        with bounded_replies(2**20, 1.0), pytest.raises(requests.RequestException):
            requests.get(address, timeout=60)
        with pytest.raises(HTTPError):
            bounded_pool(address, 2**20, 1.0, retries=False, timeout=60).request("GET", "/")
        assert time.monotonic() - started < 10


def test_a_reply_says_what_it_was_too_much_of():
    large = pytest.raises(requests.RequestException, match="larger than 1 MiB")
    with hostile.serving(hostile.endless_body) as address, bounded_replies(2**20, 60), large:
        requests.get(address, timeout=60)
    slow = pytest.raises(requests.RequestException, match=r"timed out|longer than 0.5 s")
    with hostile.serving(hostile.dripping_body) as address, bounded_replies(2**20, 0.5), slow:
        requests.get(address, timeout=60)


seen = set()


def whole(connection, request):
    seen.add(connection.getpeername())
    connection.sendall(hostile.OK + b"Content-Length: 300000\r\n\r\n" + b"x" * 300_000)


def test_an_ordinary_reply_is_whole_and_its_connection_is_used_again():
    seen.clear()
    with hostile.serving(whole) as address, requests.Session() as session, bounded_replies(2**20, 5.0):
        for _ in range(5):  # more than the limit in total, but each within it
            assert session.get(address, timeout=5).content == b"x" * 300_000
        assert len(seen) == 1


def test_outside_the_block_replies_are_as_before():
    before = urllib3.connection.HTTPConnection.response_class
    with bounded_replies(1, 1.0):
        assert urllib3.connection.HTTPConnection.response_class is not before
    with hostile.serving(whole) as address:
        assert len(requests.get(address, timeout=5).content) == 300_000
