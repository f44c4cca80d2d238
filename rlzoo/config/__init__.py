"""The configuration of a run: sections of settings, and how they are composed."""
