"""The entry point: runs a command and turns exceptions into an error line and an exit code."""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import sys
import threading
import traceback
from contextlib import redirect_stdout, suppress
from types import FrameType
from typing import Any, NoReturn

from rlzoo.cli.exits import DONE, FAILED, INTERRUPTED, TERMINATED, USERS_MISTAKE
from rlzoo.config.redaction import redact
from rlzoo.core.errors import PolicyError, RunError, UserError
from rlzoo.support.distribution import damage

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
"""Errors that are clear without a file name: the disk is full, or the program that reads the output has ended."""


class Terminated(SystemExit):
    """Raised on SIGTERM or SIGHUP. It unwinds the stack as Ctrl-C does, so a run saves a checkpoint."""


def entry() -> NoReturn:
    """Run `main` as a program, and suppress tracebacks from signals that arrive while Python exits."""
    try:
        main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # background jobs of a shell ignore SIGINT
                signal.signal(number, _end_at_once)


def _end_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(INTERRUPTED if signum == signal.SIGINT else TERMINATED)


def main() -> NoReturn:
    """Run the command line and exit with 0 on success, 2 for user errors, 1 for other errors, and 130 or 143 after a signal."""
    os.environ["PYTHONSAFEPATH"] = "1"  # child processes must not import from the working directory first
    # Accelerate imports DeepSpeed if it is installed, and DeepSpeed then prints the device that it detects to stdout
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.module != "real_accelerator")
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _repeat_signal
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # sent when the terminal closes; ignored under nohup
        signal.signal(signal.SIGHUP, _terminate)
    try:
        if problem := damage():
            raise UserError(problem)
        gc.set_threshold(50_000, 10, 10)  # most objects that imports create stay alive, so frequent collections would be wasted
        from rlzoo.cli.app import app
        from rlzoo.cli.options import Lasting
        from rlzoo.cli.usage import with_home

        output: Any = Lasting(sys.stdout, survives_full=False)  # `| head -1` must not change the exit code
        with redirect_stdout(output):
            code = app([with_home(word) for word in sys.argv[1:]], prog_name="rlzoo", standalone_mode=False)
            output.flush()
        sys.exit(code or DONE)
    except KeyboardInterrupt:  # Ctrl-C before the start of a command that handles it
        sys.exit(INTERRUPTED)
    except UserError as error:
        _complain(str(error))
        sys.exit(USERS_MISTAKE)
    except (PolicyError, RunError) as error:
        _complain(": ".join([*getattr(error, "__notes__", ()), str(error)]))
        sys.exit(FAILED)
    except OSError as error:
        _report(error)
        sys.exit(FAILED)
    except Exception as error:
        if not hasattr(error, "format_message"):  # not a mistake on the command line; typer's errors have no public names
            if "RANK" in os.environ and "by peer" in str(error):  # the launcher names the process that was killed
                _complain(f"the connection to another process broke: {error}")
            else:
                _show_traceback()
            sys.exit(FAILED)
        from rlzoo.cli.usage import explain_usage

        if line := explain_usage(error):
            _complain(line)
        sys.exit(USERS_MISTAKE)


def _report(error: OSError) -> None:
    if problem := damage():  # the current directory may have been deleted since the start
        _complain(problem)
    elif error.filename is None and error.errno not in NO_ROOM:
        _show_traceback()
    else:
        _complain(": ".join(str(text) for text in (error.filename, error.strerror or error) if text is not None))


def _complain(text: str) -> None:
    from rlzoo.cli.console import print_error

    print_error(f"rlzoo: {redact(text)}")


def _show_traceback() -> None:
    print(redact(traceback.format_exc()), end="", file=sys.stderr)


def _repeat_signal(unraisable: sys.UnraisableHookArgs) -> None:
    """Send a signal again if it arrived in a destructor, where Python drops exceptions."""
    number = {KeyboardInterrupt: signal.SIGINT, Terminated: signal.SIGTERM}.get(unraisable.exc_type)
    if number is None:
        sys.__unraisablehook__(unraisable)
    else:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(TERMINATED)
