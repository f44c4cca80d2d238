"""``python -m rlzoo``."""

from rlzoo.cli import main

main()
