"""Starts commands in milliseconds instead of seconds: a process that has imported rlzoo forks itself for each of them.

Run as a program, it reads one JSON request per line on stdin and responds to each with one JSON line on stdout. It never runs
a torch operation, so the forked processes can start their own threads.
"""

import gc
import importlib
import json
import os
import resource
import runpy
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTED = (
    "matplotlib.figure",
    "mlflow",
    "transformers.models.qwen3.modeling_qwen3",
    "rlzoo.cli.app",
    "rlzoo.cli.launch",
    "rlzoo.cli.plan",
    "rlzoo.cli.progress",
    "rlzoo.lab.calibrate",
    "rlzoo.lab.evaluation",
    "rlzoo.lab.reports",
    "rlzoo.lab.sweep",
    "rlzoo.training.train",
)
OPTIONAL = ("peft",)


def become(request):
    """Run the command or a script in this process, in a new session, and exit with its exit code."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for number, file in enumerate(request["files"]):
        access = os.O_WRONLY if number else os.O_RDONLY
        os.dup2(os.open(file, access | os.O_CREAT | os.O_APPEND | os.O_NOCTTY), number)
    os.closerange(3, 256)
    streams = [os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww")]
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams
    streams[2].reconfigure(line_buffering=True, errors="backslashreplace")
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
    script = request.get("script")
    sys.argv = [script or "rlzoo", *request["words"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    from rlzoo.cli.main import entry

    code = 70
    try:
        if script:
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
            code = 0
        else:
            entry()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in streams[1:]:
            try:
                stream.flush()
            except OSError:
                code = 120  # like Python
        run_exit_functions()
        os._exit(code)


def run_exit_functions():
    """Run what Python runs before it exits, including ``threading``'s and ``multiprocessing``'s functions."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()


def ended(pid):
    """Return exit code and peak memory in bytes, or None while it runs."""
    found, status, usage = os.wait4(pid, os.WNOHANG)
    return [os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024] if found else None


class Zygote:
    """Starts commands by forking a process that has already imported everything."""

    def __init__(self):
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__],  # without -P, modules would be imported from this folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def ask(self, request):
        with self._lock:  # an attack may watch from another thread
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        assert line, "the process that starts commands has ended"
        return json.loads(line)

    def look(self, pid):
        return self.ask({"pid": pid})

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def start(self, *words, folder, files, environment=None, script=None):
        """Start a command or a script; ``files`` are the paths of stdin, stdout and stderr."""
        request = {"words": [*map(str, words)], "files": [*map(str, files)], "folder": str(folder)}
        request["script"] = script and str(script)
        pid = self.ask(request | {"environment": {**(environment or os.environ)}, "limits": {}})
        return Process(self, pid)

    def run(self, *words, folder, environment=None, timeout=280, script=None):
        """Run a command or a script to completion, like `subprocess.run` with captured output."""
        with tempfile.TemporaryDirectory() as texts:
            files = [Path(texts, name) for name in ("out", "err")]
            process = self.start(*words, folder=folder, files=(os.devnull, *files), environment=environment, script=script)
            code = process.wait(timeout)
            return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files))


class Process:
    """A started command: what `subprocess.Popen` would return, as far as tests need it."""

    def __init__(self, zygote, pid):
        self.pid, self.returncode, self._zygote = pid, None, zygote

    def poll(self):
        if self.returncode is None and (found := self._zygote.look(self.pid)) is not None:
            self.returncode = found[0]
        return self.returncode

    def wait(self, timeout):
        until = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until:
                os.killpg(self.pid, signal.SIGKILL)
                raise TimeoutError(f"the command still ran after {timeout} s")
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


CLIENT = """#!{python} -SEs
import json, os, socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
files = [f"/proc/{{os.getpid()}}/fd/{{number}}" for number in range(3)]
request = {{"words": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ), "files": files}}
connection.sendall(json.dumps(request).encode() + b"\\n")
sys.exit(int(connection.makefile().readline() or 70))
"""


@contextmanager
def shadowing(zygote, limit=1800):
    """Return a folder to put first on PATH; the command ``rlzoo`` in it is forked from the zygote."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            request = json.loads(self.rfile.readline())
            process = zygote.start(*request.pop("words"), **request)
            self.wfile.write(f"{process.wait(limit)}\n".encode())

    with tempfile.TemporaryDirectory() as folder:
        address, command = str(Path(folder) / "socket"), Path(folder) / "bin" / "rlzoo"
        with socketserver.ThreadingUnixStreamServer(address, Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            command.parent.mkdir()
            command.write_text(CLIENT.format(python=sys.executable, address=address))
            command.chmod(0o755)
            yield command.parent
            server.shutdown()


def import_all():
    for name in IMPORTED:
        importlib.import_module(name)
    for name in OPTIONAL:
        with suppress(ImportError):
            importlib.import_module(name)


def main():
    import_all()
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if "pid" in request:
            answer = ended(request["pid"])
        else:
            answer = os.fork()
            if answer == 0:
                become(request)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
