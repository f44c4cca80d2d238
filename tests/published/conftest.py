"""Skips these tests if the libraries for comparison are not installed; see docs/reference/published.md."""

import importlib.util
import sys
from pathlib import Path

needs = {
    "test_torchrl.py": ["torchrl"],
    "test_trl_losses.py": ["trl"],
    "test_verl_losses.py": ["verl"],
    "test_verl_parts.py": ["verl"],
}
collect_ignore = [file for file, names in needs.items() if not all(map(importlib.util.find_spec, names))]

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
