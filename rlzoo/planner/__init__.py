"""Estimates a run's memory, FLOPs, time and disk space from its configuration and its model's architecture."""
