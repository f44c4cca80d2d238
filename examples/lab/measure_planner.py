"""Compares the planner's forecast of a learner step's peak memory with measurements, for models with random weights.

python examples/lab/measure_planner.py            all configurations, as a table
python examples/lab/measure_planner.py --quick    three small ones, as JSON lines

The measurement uses torch's profiler, which records every allocation and release by torch's CPU allocator, including those
inside operators and in the backward pass. The peak of the running sum of these sizes is exact to the byte. The size of the
process would be less precise, because it changes by whole pages and includes the interpreter, its libraries, and memory
that the allocator has not returned. On a GPU, torch's caching allocator counts the bytes itself.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
from contextlib import nullcontext
from typing import Any

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
SMALL, MEDIUM, WIDE = (
    dict(zip(SIZES, sizes, strict=True))
    for sizes in ((192, 512, 4, 6, 2, 32), (256, 768, 6, 8, 4, 32), (768, 2304, 6, 12, 6, 64))
)

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 weights": {"settings": ["model.dtype=bfloat16"]},
    "bfloat16 weights without float32 copies": {"settings": ["model.dtype=bfloat16", "learner.master_weights=false"]},
    "bfloat16 autocast": {"settings": ["learner.autocast=bfloat16"]},
    "gradient checkpointing": {"settings": ["learner.gradient_checkpointing=true"]},
    "gradient checkpointing, bfloat16 weights": {"settings": ["learner.gradient_checkpointing=true", "model.dtype=bfloat16"]},
    "rows of 1,000 tokens": {"response": 976, "settings": ["learner.max_tokens_per_micro_batch=2000"]},
    "vocabulary of 49,152": {"vocab_size": 49152},
    "vocabulary of 49,152, head not tied": {"vocab_size": 49152, "tied": False},
    "with a reference model": {"settings": ["learner.kl_coef=0.1"]},
    "three times as wide": {**WIDE},
    "Llama": {"kind": "llama"},
    "Gemma 3": {"kind": "gemma3_text"},
    "GPT-NeoX": {"kind": "gpt_neox"},
}
QUICK: dict[str, dict[str, Any]] = {
    "float32": {**SMALL, "vocab_size": 1024},
    "gradient checkpointing": {**SMALL, "vocab_size": 1024, "settings": ["learner.gradient_checkpointing=true"]},
    "vocabulary of 16,384": {**SMALL, "vocab_size": 16384},
}


def measure(
    settings: list[str] | None = None,
    kind: str = "qwen3",
    prompt: int = 24,
    response: int = 168,
    vocab_size: int = 4096,
    tied: bool = True,
    **shape: int,
) -> dict[str, float]:
    """Return the predicted and the measured peak of a learner's tensors over two optimizer steps, in bytes."""
    import gc

    import torch
    from torch.profiler import ProfilerActivity, profile
    from transformers import AutoConfig, AutoModelForCausalLM

    from rlzoo.config.run_config import RunConfig
    from rlzoo.gate.architecture import Architecture
    from rlzoo.gate.devices import Devices
    from rlzoo.gate.plan import Plan, Prompts
    from rlzoo.learner.learner import Learner

    torch.manual_seed(0)
    torch.set_num_threads(1)
    shape = shape or MEDIUM
    sizes = {**shape, "vocab_size": vocab_size, "max_position_embeddings": 4096, "tie_word_embeddings": tied}
    model_config = AutoConfig.for_model(kind, **sizes, pad_token_id=0, bos_token_id=None, eos_token_id=1)
    architecture = Architecture(model_config)
    base = ["rollout.num_prompts=8", "rollout.group_size=4", f"rollout.max_new_tokens={response}"]
    base += ["learner.num_minibatches=2", "learner.max_tokens_per_micro_batch=1024"]
    config = RunConfig.compose(clip="grpo", overrides=[*base, *(settings or [])])
    on_gpu = torch.cuda.is_available()
    plan = Plan(config, architecture, Devices("GPU" if on_gpu else "CPU", 1, 2**40, is_cpu=not on_gpu), Prompts(prompt, True))
    assert plan.memory is not None  # cached, so that the forecast is not part of the measurement
    gc.collect()  # objects that are freed during the measurement must also have been allocated during it
    before = 0
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    recorded: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
    with nullcontext() if on_gpu else recorded:
        model = AutoModelForCausalLM.from_config(model_config).to(getattr(torch, config.model.dtype)).train()
        if config.learner.gradient_checkpointing:
            _checkpoint(model)
        learner = Learner(model, config.clip, config.learner, pad_id=0, max_length=response, num_updates=2)
        learner.update(learner.score(_batch(prompt, response, vocab_size)))
    if on_gpu:
        peak = torch.cuda.max_memory_allocated() - before
    else:
        events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
        peak = max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters == architecture.num_parameters
    return {"parameters": parameters, "predicted": sum(plan.memory.learning.values()), "measured": peak}


def _checkpoint(model: Any) -> None:
    """Enable gradient checkpointing. Transformers plans to rename the method in version 6."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def _batch(prompt: int, response: int, vocab_size: int, rows: int = 32) -> Any:
    """Return a batch of rows of different lengths so that padding is needed."""
    import torch

    from rlzoo.learner.batch import Batch

    lengths = response - torch.arange(rows) * (response // 160)
    mask = torch.arange(response) < lengths[:, None]
    return Batch(
        step=1,
        sequences=tuple(torch.randint(2, vocab_size, (prompt + int(length),)) for length in lengths),
        prompt_lengths=torch.full((rows,), prompt),
        response_mask=mask,
        turn_ids=torch.where(mask, 0, -1),
        rollout_log_probs=torch.zeros(mask.shape),
        rewards=torch.randn(rows),
        group_ids=torch.arange(rows) // 4,
        finished=torch.ones(rows, dtype=torch.bool),
    )


def main() -> None:
    """Measure each configuration in a separate process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if not options.quick:
        print("| configuration | parameters | predicted | measured | error |\n|---|---|---|---|---|")
    for name, changes in (QUICK if options.quick else CONFIGURATIONS).items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            result = pool.apply(measure, kwds=changes)
        if options.quick:
            print(json.dumps({"configuration": name, **result}), flush=True)
            continue
        predicted, measured = result["predicted"] / 1e6, result["measured"] / 1e6
        row = f"| {name} | {result['parameters'] / 1e6:.1f} M | {predicted:.1f} MB | {measured:.1f} MB |"
        print(f"{row} {100 * (predicted / measured - 1):+.1f} % |", flush=True)


if __name__ == "__main__":
    main()
