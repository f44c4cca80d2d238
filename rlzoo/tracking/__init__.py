"""MLflow follows the run directory: what stands there is sent by a process of its own, now or later, and never twice."""
