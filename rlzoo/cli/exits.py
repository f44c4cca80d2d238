"""The exit codes of all commands."""

DONE, FAILED, USERS_MISTAKE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
