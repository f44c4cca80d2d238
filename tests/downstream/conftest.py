"""Skips these tests if the libraries whose trainers they use are not installed."""

import importlib.util

needs = {"test_trl.py": ["trl"], "test_verl.py": ["verl"], "test_tinker.py": ["tinker"]}
collect_ignore = [file for file, names in needs.items() if not all(map(importlib.util.find_spec, names))]
