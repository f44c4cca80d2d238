"""The gate, which checks the engine's assumptions about settings, machine, model, tokens and data before the first step."""
