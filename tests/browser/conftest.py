"""Leaves these tests out where there is no browser to drive: they are a nox session of their own."""

import importlib.util
import shutil

collect_ignore = [] if importlib.util.find_spec("playwright") and shutil.which("chromium") else ["test_mlflow_ui.py"]
