"""The command line: composes a run from options and shows its progress and results."""
