"""Measures the machine's rates and counts the operations in a step."""

from __future__ import annotations

import json
import platform
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from examples.bench.cases import GROUP, Case
from examples.bench.turns import settle
from rlzoo.models.fast_cpu.cpu import onednn_linear

SIZE, SIZE_ON_GPU = 2048, 8192


def seconds_of(work: Callable[[], object], repeats: int = 7) -> list[float]:
    """Return the time of each repetition in seconds, after an uncounted warm-up."""
    work()
    found = []
    for _ in range(repeats):
        settle()
        started = time.perf_counter()
        work()
        settle()
        found.append(time.perf_counter() - started)
    return found


def product_rate(dtype: torch.dtype) -> float:
    """Return the current FLOP/s of square matrix products: the median of five runs, because a shared machine's rate varies."""
    size, device = (SIZE_ON_GPU, "cuda") if torch.cuda.is_available() else (SIZE, "cpu")
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / statistics.median(seconds_of(lambda: a @ b, 5))


def processor() -> str:
    """Return the name of the CPU as the system reports it."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: *(.+)$", file.read_text(encoding="utf-8") if file.exists() else "", re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def machine() -> dict[str, float]:
    """Return the FLOP/s of matrix products (float32 in torch, float32 in oneDNN, bfloat16) and the bytes/s of memory copies.

    Each rate is the best of seven repetitions.
    """
    measured = {}
    for dtype in (torch.float32, torch.bfloat16):
        a, b = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
        measured[f"matmul_{str(dtype)[6:]}"] = 2 * SIZE**3 / min(seconds_of(lambda a=a, b=b: a @ b))
    a, b = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)
    measured["onednn_float32"] = 2 * SIZE**3 / min(seconds_of(lambda: onednn_linear(a, b)))
    data = torch.zeros(2**27)
    other = torch.empty_like(data)
    measured["memory"] = 2 * data.nbytes / min(seconds_of(lambda: other.copy_(data)))
    measured["threads"] = float(torch.get_num_threads())
    return measured


def step_flops(case: Case, model: Path, prompt_lengths: list[int], lengths: list[int]) -> dict[str, float]:
    """Count the matrix-product operations in a step's sampling (which processes each prompt once) and learning.

    Learning consists of a forward pass for the old log-probs of all responses except those in the first update, another forward
    pass, and a backward pass that costs twice as much. The head is needed only for response tokens.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads", heads)
    layer = hidden * size * (2 * heads + 2 * keys) + 3 * hidden * config["intermediate_size"]
    head = hidden * config["vocab_size"]

    def body(tokens: int, seen: float) -> float:
        return layers * (2 * layer * tokens + 4 * heads * size * seen)

    sampling = learning = 0.0
    old = 0.0 if case.updates == 1 else 1 - 1 / case.updates
    for index, length in enumerate(lengths):
        prompt = prompt_lengths[index // GROUP]
        whole = prompt + length
        sampling += body(length - 1, (whole * (whole - 1) - prompt * (prompt + 1)) / 2) + 2 * head * length
        if index % GROUP == 0:
            sampling += body(prompt, prompt * (prompt + 1) / 2)
        learning += (3 + old) * (body(whole - 1, whole * (whole - 1) / 2) + 2 * head * length)
    return {"rollout": sampling, "learner": learning, "step": sampling + learning}
