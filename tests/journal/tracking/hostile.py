"""Servers that do not respond as MLflow's would; a function handles each connection's socket."""

import contextlib
import itertools
import json
import socket
import threading
import time
from contextlib import contextmanager

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
CHUNK = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"


def endless_body(connection, request):
    connection.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    for _ in itertools.count():
        connection.sendall(CHUNK)


def claimed_size(connection, request):
    connection.sendall(OK + b"Content-Length: 99999999999999\r\n\r\n")
    for _ in itertools.count():
        connection.sendall(CHUNK)


def claimed_chunk(connection, request):
    connection.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\nfffffffffff\r\n")
    for _ in itertools.count():
        connection.sendall(CHUNK)


def endless_headers(connection, request):
    connection.sendall(OK)
    for number in itertools.count():
        connection.sendall(b"X-%d: %s\r\n" % (number, b"y" * 1000))


def endless_header(connection, request):
    connection.sendall(OK + b"X: ")
    for _ in itertools.count():
        connection.sendall(b"y" * 0x10000)


def endless_continue(connection, request):
    for _ in itertools.count():
        connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def bomb(connection, request):
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    body = b"".join(packer.compress(bytes(2**20)) for _ in range(4000)) + packer.flush()
    connection.sendall(OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def dripping_body(connection, request):
    connection.sendall(OK + b"Content-Length: 100000\r\n\r\n")
    _drip(connection)


def dripping_headers(connection, request):
    connection.sendall(OK + b"X: ")
    _drip(connection)


def silence(connection, request):
    time.sleep(600)


def garbage(connection, request):
    connection.sendall(b"\x00\xff\x1b[2J not HTTP at all\r\n\r\n" * 100)


def not_json(connection, request):
    _answer(connection, b"200 OK", b"\x1b[2J\x1b]0;title\x07<html>\xff</html>")


def other_json(connection, request):
    _answer(connection, b"200 OK", b"[" * 10_000)


def wrong_json(connection, request):
    _answer(connection, b"200 OK", json.dumps({"experiment": 5, "runs": "x", "run": [1], "error_code": {}}).encode())


def empty_object(connection, request):
    _answer(connection, b"200 OK", b"{}")


def redirects(connection, request):
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n")


def closes(connection, request):
    connection.sendall(OK + b"Content-Length: 1000\r\n\r\nhalf of it")


def closes_at_once(connection, request):
    pass


def fails(connection, request):
    _answer(connection, b"500 Internal Server Error", b'{"error_code": "INTERNAL_ERROR", "message": "never"}')


ATTACKS = [
    endless_body, claimed_size, claimed_chunk, endless_headers, endless_header, endless_continue, bomb, dripping_body,
    dripping_headers, silence, garbage, not_json, other_json, wrong_json, empty_object, redirects, closes, closes_at_once,
    fails,
]  # fmt: skip


def _answer(connection, status, body):
    connection.sendall(b"HTTP/1.1 " + status + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def _drip(connection):
    for _ in itertools.count():
        connection.sendall(b"y")
        time.sleep(0.2)


@contextmanager
def serving(attack):
    """The address of a server that answers every request with an attack."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def handle(connection):
            with contextlib.suppress(OSError), connection:
                while request := connection.recv(65536):
                    attack(connection, request)
                    if attack in (closes, closes_at_once):
                        return

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=handle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
