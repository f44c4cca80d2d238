"""The entry point: runs a command and turns whatever it raises into a line and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from rlzoo.acceleration import prepare_process
from rlzoo.cli.exits import DONE, FAILED, INTERRUPTED, TERMINATED, USERS_MISTAKE
from rlzoo.errors import PolicyError, RunError, UserError
from rlzoo.support.distribution import damage, leftovers
from rlzoo.support.garbage import collect_seldom
from rlzoo.support.redaction import redact

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
"""Errors of a stream without a name that say enough: a disk is full, or nobody reads any more."""


class Terminated(SystemExit):
    """SIGTERM or SIGHUP arrived; unwinds like Ctrl-C, so that what a run has is saved."""


def entry() -> NoReturn:
    """Run the command line as a program: `main`, after which no signal prints a traceback while Python ends."""
    try:
        main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # as of a shell's background job
                signal.signal(number, _end_at_once)


def _end_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(INTERRUPTED if signum == signal.SIGINT else TERMINATED)


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 2 the user's mistake, 1 ours, 130 or 143 stopped by a signal."""
    os.environ["PYTHONSAFEPATH"] = "1"  # no Python that is started from here on looks into the working directory first
    _open_closed_streams()
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # the terminal is closed; not under nohup
        signal.signal(signal.SIGHUP, _terminate)
    try:
        if problem := damage():
            raise UserError(problem)
        if problem := leftovers():
            _complain(problem)
        collect_seldom()
        prepare_process()
        from rlzoo.cli.app import app

        app()
    except KeyboardInterrupt:  # before a command that catches it itself has begun
        sys.exit(INTERRUPTED)
    except UserError as error:
        _complain(str(error))
        sys.exit(USERS_MISTAKE)
    except (PolicyError, RunError) as error:
        _complain(": ".join([*getattr(error, "__notes__", ()), str(error)]))
        sys.exit(FAILED)
    except OSError as error:
        if error.filename is None and error.errno not in NO_ROOM:
            _show_traceback()
        else:
            _complain(": ".join(str(part) for part in (error.filename, error.strerror or error) if part is not None))
        sys.exit(FAILED)
    except Exception:
        _show_traceback()
        sys.exit(FAILED)
    sys.exit(DONE)


def _open_closed_streams() -> None:
    """Open what the shell has closed, as by ``>&-``, on /dev/null: else the next file that is opened would get the output."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # which takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False, encoding="utf-8"))


def _complain(text: str) -> None:
    from rlzoo.cli.console import print_error

    print_error(f"rlzoo: {redact(text)}")


def _show_traceback() -> None:
    print(redact(traceback.format_exc()), end="", file=sys.stderr)


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(TERMINATED)
