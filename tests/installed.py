"""Run by the interpreter of an environment with rlzoo installed from a wheel, outside the checkout."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import rlzoo
from rlzoo import RunConfig
from rlzoo.config.composition import config_names
from rlzoo.gate.settings import Start, check_settings

CONFIGS = ("arithmetic", "dapo", "dr-grpo", "dual-clip", "guess", "reinforce-pp")

home = Path(rlzoo.__file__).resolve().parent
assert "site-packages" in home.parts, f"imports the checkout at {home}"
command = [str(Path(sys.executable).with_name("rlzoo"))]
listed = subprocess.run([*command, "clips", "list", "--json"], capture_output=True, text=True, check=True).stdout
names = [row["name"] for row in json.loads(listed)]
assert len(names) >= 20, names
subprocess.run([*command, "train", "--config", CONFIGS[0], "--dry-run"], capture_output=True, check=True)
for name in CONFIGS:
    config = RunConfig.compose([name])
    check_settings(config, Start.of(config))  # as a dry run does
assert "paper/qwen3-1.7b" in config_names(), "configs in folders are missing"
for model in ("embedded", "embedded-guess"):
    assert (home / "models" / "assets" / model / "model.safetensors").is_file(), f"the shipped model {model} is missing"
assert importlib.util.find_spec("math_verify") is None, "run it with RLZOO_BARE=1, after tests/bare.py"
assert not Path("runs").exists()
print(f"policies {names}, configs and model found from {Path.cwd()}")
