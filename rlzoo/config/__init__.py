"""The configuration of a run, and how it is composed."""
