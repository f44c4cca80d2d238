"""Replaces the `rlzoo ui` process: runs MLflow's server, and prints the address of the page when the server is ready.

Until then, the server's output is held back, and it is printed only if the server fails to start. Later output, such as
errors, is printed as it arrives. The module imports only the standard library, because it stays in memory while the server
runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import webbrowser
from types import FrameType
from typing import IO

POLL = 0.2  # seconds between requests to a server that is not ready
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


class Server:
    """MLflow's server as a child process, with its output."""

    def __init__(self, command: list[str]) -> None:
        self.is_ready = self.is_stopping = False
        self._held = bytearray()
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509  (there are no threads yet)
        )
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def wait_until_ready(self, address: str) -> bool:
        """Return True when the server answers, or False if it ends first."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while self._process.poll() is None and not self.is_stopping:
            try:
                direct.open(f"{address}/health", timeout=1).close()
            except urllib.error.HTTPError as error:  # the server is ready, but rejects this host name
                error.close()
            except Exception:
                time.sleep(POLL)
                continue
            with self._lock:
                self.is_ready = True
            return True
        return False

    def stop(self) -> None:
        """Ask the server to stop; a second call kills it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL if self.is_stopping else signal.SIGTERM)
        self.is_stopping = True

    def wait(self) -> int:
        """Wait for the server to end, print its output if it was never ready, and return its exit code."""
        code = self._process.wait()
        self._reader.join(1)
        if not self.is_ready and not self.is_stopping:
            self._print(self._held)
        return 128 - code if code < 0 else code

    def _read(self, output: IO[bytes]) -> None:
        for line in output:
            with self._lock:
                if not self.is_ready:
                    self._held += line
                elif not self.is_stopping:  # drop the tracebacks that a stopping server prints
                    self._print(line)

    def _print(self, text: bytes | bytearray) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.buffer.write(text)
            sys.stderr.flush()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def main(address: str, page: str, line: str, is_opened: str, *command: str) -> int:
    """Run the server until it ends, and return an exit code.

    Args:
        address: address of the server.
        page: address of the page.
        line: what to print when the server is ready.
        is_opened: any non-empty string to open the page in the default browser; empty otherwise.
        command: command that starts the server.
    """
    server, signals = Server(list(command)), list[int]()

    def stop(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    if server.wait_until_ready(address):
        print(line, flush=True)
        if is_opened:
            webbrowser.open(page)
    code = server.wait()
    return 128 + signals[0] if signals else code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
