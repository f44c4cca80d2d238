"""General helpers for files, locks, worker processes, parsing untrusted input, and the installation."""
