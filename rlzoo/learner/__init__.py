"""Trains on a batch, which includes scoring, rule evaluation, gradients and optimizer steps."""
