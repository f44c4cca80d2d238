"""The training loop, including what follows a step (evaluation, logging and checkpoints), stopping and resuming."""
