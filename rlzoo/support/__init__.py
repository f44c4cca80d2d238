"""Helpers that know nothing of reinforcement learning: files, locks, signals, worker processes, parsing of untrusted input."""
