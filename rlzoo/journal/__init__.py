"""Persists a run: the run directory, checkpoints, recorded rollouts and the upload to MLflow."""
