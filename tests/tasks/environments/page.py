"""The instructions of docs/how-to/environments.md, and functions that follow them in tests."""

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import rlzoo
from rlzoo.lab.recorded import RecordedRun
from tests.training.short import lines

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "environments.md").read_text()


def section(title):
    """Return the text below a heading."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def write_file(title, folder):
    """Write the file that a section shows; returns its path."""
    name, text = re.search(r"<!-- file: (.+?) -->\n```python\n(.*?)```", section(title), re.DOTALL).groups()
    (folder / name).write_text(text)
    return folder / name


def train(title, folder, model, changed=()):
    """Run a section's command in a folder, with another model; returns the run directory and the metrics of both its steps."""
    (command,) = re.findall(r"```bash\n(rlzoo train .*?)```", section(title), re.DOTALL)
    for before, after in [("model.path=smollm2", f"model.path={model}"), *changed]:
        assert before in command
        command = command.replace(before, after)
    words = shlex.split(command.replace("\\\n", " "))[1:]
    path = folder / "run"
    run = [sys.executable, "-m", "rlzoo", *words, "--set", "tracking.mlflow=false", "--output", str(path)]
    said = subprocess.run(run, cwd=folder, capture_output=True, text=True, check=False, timeout=1200)
    assert said.returncode == 0, said.stderr[-3000:]
    rows = [row for row in lines(path / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2]
    return path, rows


def check_training(path, rows):
    """Check that both steps used multi-turn episodes without failures, and that only the model's tokens are in the mask."""
    for row in rows:
        assert row["env/failed"] == 0
        assert row["env/turns_mean"] > 1
        assert row["response/truncated"] < 1
        assert row["learner/skipped"] == 0
        assert row["learner/grad_norm"] > 0
    tokenizer = AutoTokenizer.from_pretrained(rlzoo.RunConfig.compose([path / "config.yaml"]).model.path)
    steps = {update.step: update for update in RecordedRun.read(path).updates}
    assert list(steps) == [1, 2]
    for step, update in steps.items():
        assert torch.equal(update.inputs.response_mask, update.inputs.turn_ids >= 0)
        assert (update.inputs.turn_ids.amax(1) > 0).any()
        played = [written(row["turns"]) for row in lines(path / "rollouts" / f"{step:06}.jsonl")]
        for ids, turn_ids in zip(
            (update.batch.sequences[row] for row in update.rows), update.inputs.turn_ids.tolist(), strict=True
        ):
            assert recorded(ids.tolist(), turn_ids, tokenizer) in played


def written(turns):
    """Return the expected text of an episode: the model's turns, with the observations in SmolLM2's template between them."""
    between = [f"\n<|im_start|>user\n{turn['observation']}<|im_end|>\n<|im_start|>assistant\n" for turn in turns[:-1]]
    return [text for pair in zip([turn["text"] for turn in turns], [*between, ""], strict=True) for text in pair][:-1]


def recorded(ids, turn_ids, tokenizer):
    """Return the texts of an episode's tokens after its prompt, one for each turn and for each gap between turns."""
    while turn_ids[-1] < 0:  # padding
        turn_ids = turn_ids[:-1]
    places = [list(run) for _, run in itertools.groupby(range(len(turn_ids)), turn_ids.__getitem__)]
    ids = ids[-len(turn_ids) :]
    return [tokenizer.decode([ids[place] for place in run], skip_special_tokens=turn_ids[run[0]] >= 0) for run in places]
