"""General helpers: files, locks, worker processes, parsing of untrusted input, and the installation."""
