"""Persists a run in the run directory, with checkpoints and recorded rollouts, and uploads it to MLflow."""
