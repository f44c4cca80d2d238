"""Trains on a batch: scoring, rule evaluation, gradients and optimizer steps."""
