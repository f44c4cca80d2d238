"""Counts the operators and host reads per decoded token for each sampling method that makes fewer calls than `generate`.

    python -m examples.bench.launches               # the tiny shape, a minute on a CPU
    python -m examples.bench.launches qwen3-0.6b    # needs 4 GB of memory

A CPU has no launches, but a GPU launches about one kernel for each operator that computes something. A read makes the host wait
for the device. For "graph", a CUDA graph replays a step as one launch. Operators and reads outside the graph are counted
separately.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from examples.bench.models import SHAPES, qwen3
from rlzoo.rollout import graphs
from rlzoo.rollout.decode import decode
from rlzoo.rollout.draws import row_uniforms

ROWS, SIZE, SHORT, LONG = 4, 8, 33, 97
"""The number of responses, the tokens per prompt, and two response lengths, whose difference gives the counts per token."""
WAYS: dict[str, dict[str, bool]] = {"rows": {}, "fused": {"fuses": True}, "graph": {"fuses": True, "graphs": True}}
READS = ("aten::_local_scalar_dense", "aten::nonzero")
"""Operators that wait for the device. ``aten::item`` calls the first one."""
VIEWS = (
    "view",
    "reshape",
    "as_strided",
    "expand",
    "slice",
    "select",
    "transpose",
    "permute",
    "squeeze",
    "unsqueeze",
    "t",
    "split",
)
NO_KERNEL = {f"aten::{name}" for name in (*VIEWS, "narrow", "chunk", "unflatten", "alias", "detach", "empty", "empty_strided")}
REPLAYED = "replayed"


def is_replayed(event: Any) -> bool:
    """Return whether an event happened in a step that a CUDA graph would replay."""
    while event is not None:
        if event.name == REPLAYED:
            return True
        event = event.cpu_parent
    return False


def counted(model: Any, limit: int, way: dict[str, bool]) -> Counter[str]:
    """Decode ``limit`` tokens and return counts of the operators that compute something, the reads, and the replays."""
    prompts = [tuple(range(2, SIZE + 2 - row % 2)) for row in range(ROWS)]  # prompts of different lengths
    uniforms = row_uniforms(0, range(ROWS), limit)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        decode(model, prompts, uniforms, end_ids=frozenset({model.config.vocab_size}), pad_id=0, temperature=1.0, **way)
    counts: Counter[str] = Counter()
    for event in recorded.events():
        if event.name == REPLAYED:
            counts["replays"] += 1
        is_leaf = not any(child.name.startswith("aten::") for child in event.cpu_children)
        if not event.name.startswith("aten::") or event.name in NO_KERNEL or not (is_leaf or event.name in READS):
            continue
        kind = "reads" if event.name in READS else "operators"
        counts[kind] += 1
        counts[f"{kind} outside"] += not is_replayed(event)
    return counts


def main(name: str) -> None:
    """Print a table."""
    from transformers import Qwen3ForCausalLM

    step = graphs.StaticSteps._step

    def labelled(self: graphs.StaticSteps) -> None:
        with record_function(REPLAYED):
            step(self)

    graphs.StaticSteps._step = labelled  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(qwen3(SHAPES[name], max_position_embeddings=4096, tie_word_embeddings=True)).eval()
    print(f"{name}, {SHAPES[name][3]} layers, per token of {ROWS} responses")
    print(
        "| way | operators | reads | operators outside replays | reads outside replays | replays |\n|---|---|---|---|---|---|"
    )
    for way, settings in WAYS.items():
        short, long = (counted(model, limit, settings) for limit in (SHORT, LONG))
        kinds = ("operators", "reads", "operators outside", "reads outside", "replays")
        cells = (f"{(long[kind] - short[kind]) / (LONG - SHORT):.3g}" for kind in kinds)
        print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES, nargs="?", default="tiny")
    main(parser.parse_args().shape)
