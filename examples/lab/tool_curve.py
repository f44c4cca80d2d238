"""Draws the rewards and calls over the steps of a run to show how a model learns to use a tool.

``python examples/lab/tool_curve.py RUN picture.svg`` reads ``metrics.jsonl`` and ``rollouts`` in the run directory. It draws
the held-out accuracy, the mean reward of the sampled episodes, and the number of answered calls per episode, and prints the
values as a table. A call in a turn that was cut off is not answered and does not count.
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rlzoo.tasks.environments.tools import find_calls

run, picture = map(Path, sys.argv[1:])
rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
held_out = {row["step"]: row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
reward = {row["step"]: row["reward/mean"] for row in rows if "reward/mean" in row}
clipped = {row["step"]: row["clip/fraction"] for row in rows if "clip/fraction" in row}
calls, callers = {}, {}
for file in sorted((run / "rollouts").glob("*.jsonl")):
    episodes = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    answered = [
        sum(len(find_calls(turn["text"])) for turn in episode.get("turns", ()) if turn["observation"]) for episode in episodes
    ]
    calls[int(file.stem)] = sum(answered) / len(answered)
    callers[int(file.stem)] = sum(map(bool, answered)) / len(answered)

columns = {
    "held-out accuracy": held_out,
    "reward": reward,
    "calls per episode": calls,
    "episodes with a call": callers,
    "clip fraction": clipped,
}
print("| step |", " | ".join(columns), "|")
print("|---" * (1 + len(columns)) + "|")
for step in sorted({*held_out, *reward}):
    cells = (f"{of[step]:.3f}" if step in of else "" for of in columns.values())
    print(f"| {step} |", " | ".join(cells), "|")

mpl.rcParams["svg.hashsalt"] = "rlzoo"  # a fixed salt makes the file reproducible
figure = Figure(figsize=(9, 3.4), layout="constrained")
left, right = figure.subplots(1, 2, sharex=True)
left.plot(held_out.keys(), held_out.values(), "o-", color="#0072b2", label="held-out sums")
left.plot(reward.keys(), reward.values(), "s--", color="#d55e00", ms=4, lw=1, label="sampled episodes")
left.set(title="right answers", ylim=(-0.03, 1.03))
left.legend(frameon=False)
right.plot(calls.keys(), calls.values(), "s-", color="#009e73", label="calls per episode")
right.plot(callers.keys(), callers.values(), "^--", color="#cc79a7", ms=4, lw=1, label="episodes with a call")
right.set(title="answered calls, sampled episodes", ylim=(-0.03, max([1.0, *calls.values()]) * 1.03))
right.legend(frameon=False)
for axes in (left, right):
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
figure.savefig(picture, metadata={"Date": None})
