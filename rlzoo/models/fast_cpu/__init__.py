"""Optional optimizations for CPUs. rlzoo also works without this folder, but more slowly."""
