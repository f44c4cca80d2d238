"""``python -m rlzoo``."""

import sys

if not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # the working directory, which Python puts first, comes last

from rlzoo.cli.main import entry

entry()
