"""Part ``speed``: measures tokens per second by phase, device utilisation and peak memory, without requirements.

Only the model's FLOPs in matrix products and causal attention are counted (`roofline.step_flops`). Learning counts as three
forward passes without recomputation, and the head counts only for response tokens. PaLM's formula, 6 N + 12 l h d T per token,
which nanochat and torchtitan use, counts full attention and counts the head for all tokens, so it gives a higher utilisation
for the same time.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from examples.bench import roofline, turns
from examples.bench.cases import CASES as BENCH
from examples.bench.cases import GROUP, find
from examples.bench.cases import Case as BenchCase
from examples.gpu.rows import AbsentError, Case, Outcome, Setting

MEASURED = 2
"""Number of repetitions after an uncounted warm-up."""


def shape(setting: Setting) -> BenchCase:
    """Return the case with the shape of Qwen3-1.7B or, if ``quick`` is set, with two narrow layers."""
    return find("small-qwen3" if setting.quick else "gpu-qwen3")


@cache
def rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product in the given data type, measured once."""
    return roofline.product_rate(dtype)


def products(setting: Setting) -> Outcome:
    """Measure the rate of matrix products, to which utilisation is relative."""
    rates = {str(dtype)[6:]: rate(dtype) / 1e12 for dtype in (torch.float32, torch.bfloat16)}
    values: dict[str, Any] = {f"{name}_teraflops": value for name, value in rates.items()}
    values["tf32"] = torch.backends.cuda.matmul.allow_tf32
    return Outcome(", ".join(f"{name} {value:.3g} TFLOP/s" for name, value in rates.items()), values)


def utilisation(model: Path, batch: Any, seconds: float, autocast: str) -> float:
    """Return the utilisation of learning from a scored batch: the model's FLOPs divided by the time and the measured rate.

    Responses to one prompt are consecutive. Responses with an advantage of 0 need only a forward pass.
    """
    learns = (batch.advantages != 0).any(dim=-1).tolist()
    passes = [0.0, 0.0]  # FLOPs of learning from the responses with an advantage of 0 and from the others
    for start in range(0, len(batch), GROUP):
        for learning in (False, True):
            lengths = [int(batch.lengths[row]) for row in range(start, start + GROUP) if learns[row] == learning]
            prompt = [int(batch.prompt_lengths[start])]
            passes[learning] += roofline.step_flops(BENCH["equal"], model, prompt, lengths)["learner"]
    flops = passes[True] + passes[False] / 3
    return flops / seconds / rate(torch.bfloat16 if autocast == "bfloat16" else torch.float32)


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Do the work. Return its result and the time it took, in seconds."""
    turns.settle()
    started = time.perf_counter()
    result = work()
    turns.settle()
    return result, time.perf_counter() - started


def outcome_of(values: dict[str, Any]) -> Outcome:
    """Return an outcome with a line that lists the measured values."""
    shown = {
        "sampling": "sampling {:,.0f} tokens/s",
        "scoring": "scoring {:,.0f}",
        "learning": "learning {:,.0f}",
        "utilisation": "utilisation {:.1%}",
        "peak_bytes": "peak {:.2f} GB",
    }
    if "sampling" in values and "scoring" in values and "learning" not in values:
        shown["scoring"] += ", nothing to learn from: all rewards were equal"
    scaled = values | ({"peak_bytes": values["peak_bytes"] / 1e9} if "peak_bytes" in values else {})
    return Outcome(", ".join(text.format(scaled[name]) for name, text in shown.items() if name in values), values)


def steps(run: Any) -> Outcome:
    """Measure whole steps of a run, phase by phase. Scoring is a forward pass on all responses."""
    from rlzoo.training import loop

    clocks = {phase: turns.Clock() for phase in ("sampling", "learning")}
    batches: list[Any] = []
    update = clocks["learning"].around(run.learner.update)
    run.sample = clocks["sampling"].around(run.sample)

    def kept_update(batch: Any, *more: Any) -> Any:
        batches.append(batch)
        return update(batch, *more)

    run.learner.update = kept_update
    seconds: dict[str, list[float]] = {"sampling": [], "learning": [], "scoring": []}
    rates: dict[str, list[float]] = {phase: [] for phase in seconds}
    utilised, peak, model = [], 0, Path(run.config.output) / "shape"
    run.model.config.save_pretrained(model)
    for number, (step, row, _) in enumerate(itertools.islice(loop.steps(run), MEASURED + 1)):
        run.directory.log(step, row)
        run.complete(step)
        peak = max(peak, turns.peak_bytes())
        batch = batches.pop()
        taken = {phase: clock.take() for phase, clock in clocks.items()}
        taken["scoring"] = timed(partial(run.learner.log_probs, batch))[1]
        if number == 0:
            turns.forget_peak()
            continue
        tokens = int(batch.lengths.sum())
        has_signal = bool((batch.advantages != 0).any())
        for phase, value in taken.items():
            if phase != "learning" or has_signal:
                rates[phase].append(tokens / value)
        if has_signal:
            utilised.append(utilisation(model, batch, taken["learning"], run.config.learner.autocast))
    run.leave()
    medians = {phase: statistics.median(found) for phase, found in rates.items() if found}
    if utilised:
        medians["utilisation"] = statistics.median(utilised)
    return outcome_of(medians | {"peak_bytes": peak})


def whole(setting: Setting, name: str) -> Outcome:
    """Measure whole steps of the default run, of SmolLM2 on sums, or of the Qwen3 shape."""
    from examples.bench.rlzoo_worker import make_run
    from rlzoo import RunConfig
    from rlzoo.gate.enter import enter
    from rlzoo.training.run import Run

    if name == "shape":
        return steps(make_run(shape(setting), setting.models))
    quiet = ["eval.num_problems=0", "tracking.mlflow=false"]
    small = ["rollout.num_prompts=2", "rollout.max_new_tokens=12"] if setting.quick and name == "smollm2" else []
    output = Path(tempfile.mkdtemp(prefix="rlzoo-gpu-")) / "run"
    configs = {"configs": ["smollm2-sums"]} if name == "smollm2" else {}
    config = RunConfig.compose(clip="fspo", overrides=[*quiet, *small], steps=100, output=output, **configs)
    with config.task:
        return steps(Run(enter(config, config.task)))


def needs(*modules: str) -> None:
    """Raise AbsentError if one of the modules is not installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise AbsentError(f"{' and '.join(missing)} not installed")


def sampling(setting: Setting, engine: str) -> Outcome:
    """Measure a sampling method separately."""
    from examples.bench.rlzoo_worker import make_run

    if engine == "vllm":
        needs("vllm")
    case = shape(setting)
    own = ["rollout.vllm.dtype=bfloat16"] if engine == "vllm" else []
    run = make_run(case, setting.models, f"rollout.engine={engine}", *own)
    sampler, prompts = run.rollouts.sampler, [case.prompt(index) for index in range(case.num_prompts)]
    if sampler.needs_weights:
        sampler.update_weights(run.learner.weights())
    with run.accelerator.autocast():
        limit, sampler.max_new_tokens = sampler.max_new_tokens, 16
        sampler.sample(prompts, GROUP, seed=0)
        sampler.max_new_tokens = limit
        turns.forget_peak()
        rollouts, seconds = timed(lambda: sampler.sample(prompts, GROUP, seed=1))
    peak = turns.peak_bytes()
    run.rollouts.close()
    tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    return outcome_of({"sampling": tokens / seconds, "peak_bytes": peak, "tokens": tokens})


def learning(setting: Setting, overrides: tuple[str, ...], *, ragged: bool = False, compiles: bool = False) -> Outcome:
    """Measure scoring and learning from random responses of known lengths."""
    from examples.bench.rlzoo_worker import make_run

    case = shape(setting)
    run = make_run(case, setting.models, *overrides)
    learner, batch = run.learner, random_batch(case, run.model, ragged=ragged)
    if compiles:
        learner.language_model.base_model.compile(dynamic=True, backend="aot_eager" if setting.quick else "inductor")
    tokens = int(batch.lengths.sum())
    scored = learner.score(batch)
    learner.update(scored)
    learner.log_probs(batch)  # without gradients, the model is compiled to a different graph
    turns.forget_peak()
    scoring = [timed(lambda: learner.log_probs(batch))[1] for _ in range(MEASURED)]
    taken = [timed(lambda: learner.update(scored))[1] for _ in range(MEASURED)]
    peak, seconds = turns.peak_bytes(), statistics.median(taken)
    used = utilisation(case.model(setting.models), scored, seconds, run.config.learner.autocast)
    rates = {"scoring": tokens / statistics.median(scoring), "learning": tokens / seconds}
    return outcome_of(rates | {"utilisation": used, "peak_bytes": peak})


def random_batch(case: BenchCase, model: Any, *, ragged: bool) -> Any:
    """Return a batch of random responses of the case's length. If ``ragged``, lengths start at a sixteenth of that length."""
    from rlzoo.learner.batch import Batch

    rng = torch.Generator().manual_seed(0)
    number, longest = case.completions, case.max_new_tokens
    shortest = longest // 16 if ragged else longest
    lengths = torch.linspace(shortest, longest, number).long()
    prompts = torch.full((number,), len(case.prompt(0).split()))
    mask = torch.arange(longest) < lengths[:, None]
    return Batch(
        step=1,
        sequences=tuple(
            torch.randint(2, model.config.vocab_size, (size,), generator=rng) for size in (prompts + lengths).tolist()
        ),
        prompt_lengths=prompts,
        response_mask=mask,
        turn_ids=torch.where(mask, 0, -1),
        rollout_log_probs=torch.zeros(mask.shape),
        rewards=(torch.arange(number) % 2).float(),
        group_ids=torch.arange(number) // GROUP,
        finished=torch.ones(number, dtype=torch.bool),
    )


def packing(setting: Setting, attention: str) -> Outcome:
    """Measure learning from packed rows with one of transformers' attention implementations."""
    if attention == "flash_attention_2":
        if setting.device == "cpu":
            raise AbsentError("flash-attn needs a GPU")
        needs("flash_attn")
    if attention == "flex_attention" and setting.device == "cpu":
        raise AbsentError("flex_attention has no backward pass on a CPU")
    return learning(setting, ("learner.packing=true", f"model.attn_implementation={attention}"), ragged=True)


def low_rank(setting: Setting) -> Outcome:
    """Measure learning with LoRA. Its FLOPs are counted as if all weights were trained."""
    needs("peft")
    return learning(setting, ("learner.lora.rank=16",))


CHECKPOINTED = ("learner.gradient_checkpointing=true",)
CASES = [
    Case("products", "products of square matrices", "", products),
    Case("learn", "the shape: learning", "", partial(learning, overrides=())),
    Case("sample-hf", "the shape: sampling with our decoding (`hf`)", "", partial(sampling, engine="hf")),
    Case("step-default", "the default run, float32", "", partial(whole, name="default")),
    Case("step-smollm2", "SmolLM2's sums", "", partial(whole, name="smollm2")),
    Case("learn-checkpointing", "the shape: activation checkpointing", "", partial(learning, overrides=CHECKPOINTED)),
    Case("learn-lora", "the shape: LoRA of rank 16", "", low_rank),
    Case("learn-bfloat16", "the shape: bfloat16 weights, float32 copies", "",
         partial(learning, overrides=("model.dtype=bfloat16",))),
    Case("ragged-padded", "the shape: ragged responses, padded", "", partial(learning, overrides=(), ragged=True)),
    *(
        Case(f"ragged-packed-{name}", f"the shape: ragged responses, packed, `{name}`", "", partial(packing, attention=name))
        for name in ("sdpa", "flash_attention_2", "flex_attention")
    ),
    Case("learn-compiled", "the shape: torch.compile (at a small scale: `aot_eager`)", "",
         partial(learning, overrides=(), compiles=True)),
    Case("sample-generate", "the shape: sampling with transformers' `generate`", "", partial(sampling, engine="generate")),
    Case("sample-vllm", "the shape: sampling with vLLM", "", partial(sampling, engine="vllm")),
    Case("step-shape", "the shape: whole steps", "", partial(whole, name="shape")),
]  # fmt: skip
"""The cases, in the order in which they run. "The shape" is that of Qwen3-1.7B, with 64 responses of 1,024 tokens."""
