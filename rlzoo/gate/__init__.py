"""The gate: checks all of the engine's assumptions about settings, machine, model, tokens and data before the first step."""
