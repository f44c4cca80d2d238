"""Measures tokens per second for vLLM and transformers in alternation, with the same prompts and weights.

python examples/lab/measure_vllm.py --model embedded --prompts 32 --samples 8 --tokens 80 --pairs 7
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from rlzoo import RunConfig
from rlzoo.config.engines import engine_of
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from rlzoo.rollout.sampler import Sampler


def tokens_per_second(sampler: Sampler, prompts: list[str], samples: int, seed: int) -> float:
    started = time.perf_counter()
    rollouts = sampler.sample(prompts, samples, seed=seed)
    return sum(len(rollout.response_ids) for rollout in rollouts) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    overrides = [f"model.path={options.model}", f"model.dtype={options.dtype}", f"rollout.max_new_tokens={options.tokens}"]
    overrides += [f"model.chat_template={str(options.model != 'embedded').lower()}", "rollout.vllm.max_model_len=256"]
    model, tokenizer = load_pretrained(options.model, options.dtype)
    samplers = {}
    for engine in ("hf", "vllm"):
        config = RunConfig.compose(clip="grpo", overrides=[*overrides, f"rollout.engine={engine}"])
        end_ids = eos_token_ids(model, tokenizer)
        samplers[engine] = engine_of(config.rollout).make(model, tokenizer, end_ids, named=config.model)
    samplers["vllm"].update_weights(model.state_dict().items())
    task = config.task.model_copy(update={"seed": 0})
    prompts = [task.prompt(problem) for problem in task.train_problems(0, options.prompts)]
    for sampler in samplers.values():
        sampler.sample(prompts, options.samples, seed=0)  # the first call compiles kernels and allocates memory
    seen: dict[str, list[float]] = {engine: [] for engine in samplers}
    for pair in range(options.pairs):
        for engine in sorted(samplers, reverse=bool(pair % 2)):
            seen[engine].append(tokens_per_second(samplers[engine], prompts, options.samples, seed=1 + pair))
    ratios = sorted(vllm / hf for vllm, hf in zip(seen["vllm"], seen["hf"], strict=True))
    report = {f"{engine}_tokens_per_second": round(statistics.median(values)) for engine, values in seen.items()}
    print(json.dumps(report | {"ratio_of_pairs": [round(ratio, 2) for ratio in ratios], "median": statistics.median(ratios)}))


if __name__ == "__main__":
    main()
