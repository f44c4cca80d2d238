"""Trains on a batch: scores it, evaluates the rule, computes gradients and takes optimizer steps."""
