"""The command line: composes a run from options and shows what happens."""
