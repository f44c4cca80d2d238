"""Tracking in MLflow: a separate process sends what is in the run directory, now or later, and never twice."""

import os

# MLflow sends usage data unless this is set; rlzoo contacts no server that it was not asked to contact
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
