"""Samples responses to prompts and grades them."""
