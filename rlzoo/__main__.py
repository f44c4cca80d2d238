"""Runs the command line for ``python -m rlzoo``."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # Python puts the working directory first on the path; move it to the end

from rlzoo.cli.main import entry

entry()
