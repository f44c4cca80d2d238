"""MLflow follows the run directory: what stands there is sent by a process of its own, now or later, and never twice."""

import os

# MLflow tells its makers how it is used unless it is told not to; rlzoo reaches nobody it was not asked to reach
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
