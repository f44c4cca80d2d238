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


def redirects(connection, request):
    connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n")


def closes(connection, request):
    connection.sendall(OK + b"Content-Length: 1000\r\n\r\nhalf of it")


def fails(connection, request):
    _answer(connection, b"500 Internal Server Error", b'{"error_code": "INTERNAL_ERROR", "message": "never"}')


ATTACKS = [silence, garbage, not_json, other_json, wrong_json, redirects, closes, fails]


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
                    if attack is closes:
                        return

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=handle, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
