"""Side by side with TRL's GRPOTrainer: the same work, step by step in turns; ``nox -s bench`` runs it."""
