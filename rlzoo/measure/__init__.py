"""Measurements: one row per response, profiles by length, intervals, metrics and alarms."""
