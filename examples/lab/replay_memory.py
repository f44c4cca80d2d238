"""Writes recordings of about 2 GB, and measures the peak memory of the process that replays them.

python examples/lab/replay_memory.py --steps 20 --rules fspo,grpo
python examples/lab/replay_memory.py --steps 1 --rules fspo,grpo
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch

from rlzoo.journal.rollout_file import RolloutFile, UpdateLogProbs
from rlzoo.lab.study import replay

PROMPT, LONGEST, UPDATES = 64, 2000, 4  # tokens, tokens, optimizer steps on each batch
BYTES_PER_TOKEN = 21  # token ID 8, mask 1, and three log-probs
GROUP = 8


def write(file: Path, step: int, num_responses: int) -> None:
    """Write a step whose log-probs drift from update to update."""
    draws = torch.Generator().manual_seed(step)
    lengths = torch.randint(LONGEST // 50, LONGEST, (num_responses,), generator=draws)
    sizes, number = lengths + PROMPT, int(lengths.sum())
    starts = sizes.cumsum(0) - sizes
    place = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
    sampled = -torch.rand(number, generator=draws)
    noise = 0.02 * torch.randn(number, generator=draws)
    by_response = torch.split(sampled, lengths.tolist()), torch.split(noise, lengths.tolist())
    updates = []
    for index, rows in enumerate(torch.arange(num_responses).chunk(UPDATES)):
        moved = [by_response[0][row] + index * by_response[1][row] for row in rows.tolist()]
        updates.append(UpdateLogProbs(rows, torch.cat(moved).clamp_max(0)))
    RolloutFile(
        step=step,
        token_ids=torch.randint(100, (int(sizes.sum()),), generator=draws),
        sequence_lengths=sizes,
        response_mask=place >= PROMPT,
        group_ids=torch.arange(num_responses) // GROUP,
        rewards=torch.rand(num_responses, generator=draws).round(),
        rollout_log_probs=sampled,
        old_log_probs=sampled,
        updates=tuple(updates),
    ).save(file)


def measure(folder: Path, rules: list[str]) -> None:
    """Replay the recording in this process, and print the peak memory and the time."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    with patch("rlzoo.lab.recorded.available_memory", return_value=0):  # as on a small machine, which keeps no recording
        replay(folder, rules)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"before_GB": before / 1e6, "peak_GB": peak / 1e6, "seconds": round(time.perf_counter() - start)}))


def main() -> None:
    """Write the recording, and replay it in a new process."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rules", default="fspo,grpo")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.rules.split(","))
        return
    number = round(options.gigabytes * 1e9 / BYTES_PER_TOKEN / (LONGEST / 2 + PROMPT) / options.steps / GROUP) * GROUP
    with tempfile.TemporaryDirectory() as folder:
        for step in range(1, options.steps + 1):
            write(Path(folder, f"{step:06d}.safetensors"), step, number)
        total = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(f"{options.steps} files with {total / 1e9:.2f} GB in total, {number} responses each", flush=True)
        subprocess.run([sys.executable, __file__, "--measure", folder, "--rules", options.rules], check=True)


if __name__ == "__main__":
    main()
