"""What docs/how-to/environments.md says is to be done, and how a test does it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "environments.md").read_text()


def section(title):
    """The text below a heading."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def write_file(title, folder):
    """Write the file that a section shows; gives its path."""
    name, text = re.search(r"<!-- file: (.+?) -->\n```python\n(.*?)```", section(title), re.DOTALL).groups()
    (folder / name).write_text(text)
    return folder / name


def train(title, folder, model, changed=()):
    """Run a section's command in a folder, with another model; gives the rows of its metrics."""
    (command,) = re.findall(r"```\n(rlzoo train .*?)```", section(title), re.DOTALL)
    for before, after in [("model.path=smollm2", f"model.path={model}"), *changed]:
        assert before in command
        command = command.replace(before, after)
    words = shlex.split(command.replace("\\\n", " "))[1:]
    run = [sys.executable, "-m", "rlzoo", *words, "--set", "tracking.mlflow=false", "--output", str(folder / "run")]
    said = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False, timeout=1200)
    assert said.returncode == 0, said.stderr[-3000:]
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
