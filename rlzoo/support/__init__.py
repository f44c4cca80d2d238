"""General helpers: files, locks, signals, worker processes and parsing of untrusted input."""
