"""Optional optimizations for CPUs. Everything also works without this folder, but more slowly."""
