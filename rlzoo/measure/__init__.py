"""Measurements of a run: response tables, profiles by length, confidence intervals, metrics and alarms."""
