"""Skips these tests if there is no browser; they are a separate nox session."""

import importlib.util
import shutil

collect_ignore = (
    [] if importlib.util.find_spec("playwright") and shutil.which("chromium") else ["test_mlflow_ui.py", "test_site.py"]
)
