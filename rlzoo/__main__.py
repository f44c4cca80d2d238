"""Runs the command line for ``python -m rlzoo``."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # move the working directory, which Python puts first, to the end

from rlzoo.cli.main import entry

entry()
