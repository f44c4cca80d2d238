"""Sampling and grading: prompts in, graded responses out."""
