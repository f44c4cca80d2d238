"""A process that has imported rlzoo and forks itself for each command: a command then starts in milliseconds, not seconds.

Reads one JSON request per line on stdin and answers each with one JSON line on stdout. It never runs an operation of torch,
so the forked processes can start threads of their own.
"""

import gc
import importlib
import json
import os
import resource
import signal
import sys
import traceback
import types

IMPORTED = (
    "matplotlib.figure",
    "mlflow",
    "peft",
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


def become(request):
    """Turn into the command, in a session of its own, and end with its exit code."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    for number, file in enumerate(request["files"]):
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND) if file else -1
        os.close(number) if opened < 0 else os.dup2(opened, number)
    os.closerange(3, 256)
    modes = ("r", "w", "w")
    streams = [
        os.fdopen(number, modes[number], closefd=False) if file else None for number, file in enumerate(request["files"])
    ]
    sys.stdin, sys.stdout, sys.stderr = streams
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = streams
    if streams[2] is not None:
        streams[2].reconfigure(line_buffering=True, errors="backslashreplace")
    for name, limit in request["limits"].items():
        resource.setrlimit(getattr(resource, name), (limit, limit))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job starts with Ctrl-C ignored
    sys.argv = ["rlzoo", *request["words"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    from rlzoo.cli.main import entry

    code = 70
    try:
        entry()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in streams[1:]:
            if stream is not None:
                try:
                    stream.flush()
                except OSError:
                    code = 120  # as Python does
        run_exit_functions()
        os._exit(code)


def run_exit_functions():
    """What Python runs before it ends: ``threading``'s and ``multiprocessing``'s functions among them."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()


def ended(pid):
    """Exit code and peak memory in bytes, or None while it runs."""
    found, status, usage = os.wait4(pid, os.WNOHANG)
    return [os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024] if found else None


def main():
    for name in IMPORTED:
        importlib.import_module(name)
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
