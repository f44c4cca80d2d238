"""MLflow tracking. A separate process sends the contents of the run directory to MLflow exactly once."""

import os

# MLflow sends usage data by default, but rlzoo contacts only servers that the user has configured
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
