"""The gate: everything that the engine assumes about settings, machine, model, tokens and data is asked here, before step 1."""
