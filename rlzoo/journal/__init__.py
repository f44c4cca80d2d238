"""Persists a run. Covers the run directory, checkpoints, recorded rollouts and the upload to MLflow."""
