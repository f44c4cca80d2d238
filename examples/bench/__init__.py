"""Benchmarks against TRL's GRPOTrainer. Both libraries do the same work in alternating steps. Run with ``nox -s bench``."""
