"""Compares rlzoo's decoding with vLLM's on the same prompts and weights, alternating between them.

The script needs an environment with both libraries, such as that of `nox -s vllm`.

python -m examples.bench.samplers smollm2
python -m examples.bench.samplers smollm2 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from examples.bench.cases import CASES, GROUP
from examples.bench.rlzoo_worker import make_run


def main(name: str, dtype: str, pairs: int) -> None:
    """Print the median tokens per second over pairs, after an uncounted warm-up of each sampler."""
    case, folder = CASES[name], Path(tempfile.gettempdir()) / "rlzoo-bench-models"
    prompts = [case.prompt(index) for index in range(case.num_prompts)]
    autocast = f"learner.autocast={'none' if dtype == 'float32' else dtype}"
    own = make_run(case, folder, autocast)
    other = make_run(case, folder, autocast, "rollout.engine=vllm", f"rollout.vllm.dtype={dtype}")
    other.rollouts.sampler.update_weights(other.learner.weights())
    rates: dict[str, list[float]] = {"rlzoo": [], "vLLM": []}
    for turn in range(pairs + 1):
        for who, run in (("rlzoo", own), ("vLLM", other))[:: 1 if turn % 2 else -1]:
            started = time.perf_counter()
            with run.accelerator.autocast():
                rollouts = run.rollouts.sampler.sample(prompts, GROUP, seed=turn)
            seconds = time.perf_counter() - started
            tokens = sum(len(rollout.response_ids) for rollout in rollouts)
            if turn:
                rates[who].append(tokens / seconds)
    medians = {who: statistics.median(found) for who, found in rates.items()}
    ratios = [mine / theirs for mine, theirs in zip(*rates.values(), strict=True)]
    print(
        f"{name}, {dtype}: rlzoo {medians['rlzoo']:.0f} tokens/s, vLLM {medians['vLLM']:.0f}; rlzoo's share of vLLM's "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), {pairs} pairs"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # in gigabytes
    main(options.case, options.dtype, options.pairs)
