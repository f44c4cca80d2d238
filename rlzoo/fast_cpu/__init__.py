"""Optional speed on CPUs. Delete this folder and everything still runs, more slowly."""
