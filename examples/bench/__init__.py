"""Benchmarks against TRL's GRPOTrainer: both libraries do the same work, in alternating steps. Run with ``nox -s bench``."""
