"""The training loop, with evaluation, logging and checkpoints after a step, and with stopping and resuming."""
