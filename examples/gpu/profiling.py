"""Profiles decoding and learning on a GPU with the shape of Qwen3-1.7B.

    python -m examples.gpu.profiling               # a minute on a GPU
    python -m examples.gpu.profiling --quick       # two narrow layers, also on a CPU

The script prints the time per decoded token with and without cuDNN's attention, the number of kernel launches and
synchronizations per token, and the operators that take the most time on the device.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from examples.bench.cases import GROUP, find
from examples.bench.rlzoo_worker import make_run
from examples.gpu.speed import random_batch, timed

SHORT, LONG = 16, 80
"""Two response lengths in tokens. Their difference gives counts and times per token without the cost of the prompts."""
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "aten::_local_scalar_dense")


def profiled(work: Any) -> Any:
    """Run the work under torch's profiler and return the events by operator and by kernel."""
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as recorded:
        timed(work)
    return recorded.key_averages()


def show(events: Any, rows: int = 20) -> None:
    """Print the operators and kernels that take the most time."""
    where = "cuda" if torch.cuda.is_available() else "cpu"
    print(events.table(sort_by=f"self_{where}_time_total", row_limit=rows, max_name_column_width=80))


def decoding(run: Any, case: Any) -> None:
    """Print the time, launches and waits per token."""
    sampler, prompts = run.rollouts.sampler, [case.prompt(index) for index in range(case.num_prompts)]

    def sample(limit: int) -> None:
        sampler.max_new_tokens = limit
        sampler.sample(prompts, GROUP, seed=0)

    with run.accelerator.autocast():
        for cudnn in (False, True):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)
            sample(SHORT)
            seconds = [timed(partial(sample, limit))[1] for limit in (SHORT, LONG)]
            per_token = 1000 * (seconds[1] - seconds[0]) / (LONG - SHORT)
            print(f"decoding, cuDNN's attention {'on' if cudnn else 'off'}: {per_token:.2f} ms per token, {sampler.way}")
        torch.backends.cuda.enable_cudnn_sdp(False)
        found = [{event.key: event.count for event in profiled(partial(sample, limit))} for limit in (SHORT, LONG)]
        for about, names in (("launches", LAUNCHES), ("waits", WAITS)):
            counts = [sum(each.get(name, 0) for name in names) for each in found]
            print(f"{about} per token: {(counts[1] - counts[0]) / (LONG - SHORT):.1f}")
        show(profiled(partial(sample, SHORT)))


def learning(run: Any, case: Any) -> None:
    """Print the operators of two micro-batches' forward and backward passes."""
    learner, rows = run.learner, torch.arange(GROUP)
    scored = learner.score(random_batch(case, run.model, ragged=False))
    learner.accumulate(scored, rows)
    events = profiled(partial(learner.accumulate, scored, rows))
    print(f"learning from {GROUP} responses")
    show(events)


def main() -> None:
    """Profile the shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="use two narrow layers")
    case = find("small-qwen3" if parser.parse_args().quick else "gpu-qwen3")
    run = make_run(case, Path(tempfile.gettempdir()) / "rlzoo-bench-models")
    decoding(run, case)
    learning(run, case)


if __name__ == "__main__":
    main()
