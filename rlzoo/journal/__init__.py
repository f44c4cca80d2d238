"""What a run writes: its directory, checkpoints, recorded rollouts and MLflow."""
