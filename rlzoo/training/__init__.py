"""Training: the loop, what follows a step, stopping and resuming."""
