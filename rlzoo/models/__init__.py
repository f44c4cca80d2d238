"""Loads, converts and adapts language models."""
