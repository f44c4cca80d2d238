"""Trains a model. Covers the training loop, evaluation, logging and checkpoints after a step, stopping and resuming."""
