"""Benchmarks against TRL's GRPOTrainer: both do the same work, taking turns step by step; ``nox -s bench`` runs them."""
