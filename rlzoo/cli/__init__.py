"""The command line: composes a run from options and shows what happens."""

from __future__ import annotations

import signal
import sys
import traceback
from types import FrameType
from typing import NoReturn

from rlzoo.errors import PolicyError, RunError, UserError
from rlzoo.garbage import collect_seldom
from rlzoo.redaction import redact
from rlzoo.waiting import wait_briefly

DONE, FAILED, USERS_MISTAKE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143


class Terminated(SystemExit):
    """SIGTERM arrived; unwinds like Ctrl-C, so that what a run has is saved."""


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 2 the user's mistake, 1 ours, 130 or 143 stopped by a signal."""
    collect_seldom()
    wait_briefly()
    from rlzoo.cli.app import app

    signal.signal(signal.SIGTERM, _terminate)
    try:
        app()
    except UserError as error:
        _complain(str(error))
        sys.exit(USERS_MISTAKE)
    except (PolicyError, RunError) as error:
        _complain(": ".join([*getattr(error, "__notes__", ()), str(error)]))
        sys.exit(FAILED)
    except Exception:
        print(redact(traceback.format_exc()), end="", file=sys.stderr)
        sys.exit(FAILED)
    sys.exit(DONE)


def _complain(text: str) -> None:
    from rlzoo.cli.display import tell

    tell(f"rlzoo: {redact(text)}")


def _terminate(signum: int, frame: FrameType | None) -> NoReturn:
    raise Terminated(TERMINATED)
