"""Measures the peak memory and the time saved by chunking the log-probs. Each variant runs in a separate process.

python examples/lab/measure_log_probs.py --model smollm2 --rows 8 --tokens 512
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from typing import Any

PARTS = (
    "log-probs of given hidden states, forward and backward",
    "the whole model, forward only, as for the old policy",
    "the whole model, forward and backward",
)


def measure(model_path: str, rows: int, tokens: int, chunked: bool, part: str) -> dict[str, Any]:
    """Return the additional peak memory in MB and the time in seconds of one way to compute the log-probs."""
    import torch

    from rlzoo.learner.log_probs import ResponseLogProbs, chunked_log_probs
    from rlzoo.learner.micro_batches import ModelInputs
    from rlzoo.models.pretrained import load_pretrained

    torch.manual_seed(0)
    model, _ = load_pretrained(model_path)
    module = ResponseLogProbs(model)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    input_ids = torch.randint(0, vocabulary, (rows, tokens + 1))
    predicts = torch.ones(rows, tokens + 1, dtype=torch.bool)
    predicts[:, -1] = False
    ones = torch.ones_like(input_ids)
    batch = ModelInputs(input_ids, ones, torch.arange(tokens + 1).expand(rows, -1), predicts)
    head = model.get_output_embeddings()
    hidden = torch.randn(rows * tokens, head.weight.shape[1], requires_grad=True)
    targets = input_ids[:, 1:].flatten()
    module.chunked = chunked
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    if part == PARTS[1]:
        with torch.no_grad():
            log_probs, _ = module(batch)
    elif part == PARTS[2]:
        log_probs, _ = module(batch)
    elif chunked:
        log_probs, _ = chunked_log_probs(hidden, targets, head, 1.0)
    else:
        log_probs = head(hidden).float().log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
    if log_probs.requires_grad:
        log_probs.sum().backward()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "megabytes": (peak - before) / 1024,
        "seconds": time.perf_counter() - started,
        "log_probs": log_probs.detach().tolist(),
    }


def main() -> None:
    """Measure each part with and without chunking and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    for part in PARTS:
        results = []
        for chunked in (False, True):
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                arguments = (options.model, options.rows, options.tokens, chunked, part)
                results.append(pool.apply(measure, arguments))
        plain, ours = results
        pairs = zip(plain["log_probs"], ours["log_probs"], strict=True)
        report = {
            "part": part,
            "plain_megabytes": round(plain["megabytes"]),
            "chunked_megabytes": round(ours["megabytes"]),
            # a small model may fit in memory that the process already has
            "memory_ratio": round(ours["megabytes"] / plain["megabytes"], 3) if plain["megabytes"] else None,
            "time_ratio": round(ours["seconds"] / plain["seconds"], 2),
            "largest_difference": max(abs(a - b) for a, b in pairs),
        }
        print(json.dumps(report))


if __name__ == "__main__":
    main()
