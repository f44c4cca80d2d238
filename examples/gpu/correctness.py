"""Part ``correctness``: checks that gradients, log-probs, the results of resumed runs and memory use are within tolerance."""

from __future__ import annotations

import json
import tempfile
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from examples.gpu import oracle
from examples.gpu.data import Data, distance, gradient_of, make_data, make_learner, make_model, off_policy
from examples.gpu.rows import AbsentError, Case, Outcome, Setting

DTYPES: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"autocast": "bfloat16"}}
ORACLE = {"float32": 1e-4, "bfloat16": 5e-2}
"""Maximum relative L2 error of the gradient. TF32 would exceed the limit for float32. A bfloat16 product is off by 4e-3."""
WAYS = {"float32": 1e-5, "bfloat16": 5e-2}
"""The same maximum with other micro-batches, packing and padding."""
LOG_PROBS = {"float32": 1e-3, "bfloat16": 5e-2}
"""Maximum mean absolute difference between log-probs, in nats per token."""
FORECAST = 0.2
"""Maximum relative difference between the measured peak memory and the planner's forecast."""


@cache
def exact(name: str, rule: oracle.Rule, *, quick: bool) -> tuple[Any, Data, dict[str, Tensor]]:
    """Return a model, off-policy data that the rule partly clips, and the oracle's gradient on the data."""
    model, data = make_model(quick), make_data(name, quick, rule)
    named, advantages = dict(model.named_parameters()), data.batch.advantages[:, 0].tolist()
    return model, data, oracle.gradient(rule, named, model.config, data.rows(), data.packed_log_ratios(), advantages)


def gradient(setting: Setting, rule: str, dtype: str) -> Outcome:
    """Compare the learner's gradient with the oracle's gradient."""
    model, data, wanted = exact(rule, oracle.RULES[rule], quick=setting.quick)
    learner = make_learner(rule, model, **DTYPES[dtype])
    return judged("relative L2 error", distance(gradient_of(learner, off_policy(learner, data)), wanted), ORACLE[dtype])


WIDE = {"width_low": 0.05, "width_high": 0.05, "width_ceiling": 0.15}
"""An FSPO band so wide that rounding to bfloat16 does not move a summed log-ratio across its edges."""
OTHER_WAYS: dict[str, dict[str, Any]] = {
    "micro-batches": {"max_tokens_per_micro_batch": 64},
    "packing": {"packing": True},
    "padding": {"padding_side": "left"},
}


def other_way(setting: Setting, way: str, dtype: str) -> Outcome:
    """Compare the gradient under other settings with the oracle's gradient.

    Two settings that are both exact to within rounding may differ more from each other than from float64.
    """
    band = oracle.Rule("sum", -WIDE["width_low"], WIDE["width_high"], WIDE["width_ceiling"], grows=True)
    model, data, wanted = exact("fspo", band, quick=setting.quick)
    learner = make_learner("fspo", model, WIDE, **DTYPES[dtype], **OTHER_WAYS[way])
    return judged("relative L2 error", distance(gradient_of(learner, off_policy(learner, data)), wanted), WAYS[dtype])


def judged(what: str, error: float, allowed: float) -> Outcome:
    """Return an outcome that passes if the error is within the tolerance. NaN fails."""
    return Outcome(f"{what} {error:.1e}", {"error": error, "allowed": allowed}, passed=error <= allowed)


def log_probs(setting: Setting, engine: str, dtype: str) -> Outcome:
    """Compare the log-probs that the sampler reports with the learner's log-probs of the same tokens."""
    from examples.bench.cases import find
    from examples.bench.rlzoo_worker import make_run
    from rlzoo.learner.batch import collate

    if engine == "vllm" and find_spec("vllm") is None:
        raise AbsentError("vLLM is not installed")
    case = find("embedded" if setting.quick else "gpu-smollm2")
    autocast = DTYPES[dtype].get("autocast", "none")
    few = ["rollout.num_prompts=2", "rollout.max_new_tokens=24"] if setting.quick else []
    own = [f"rollout.vllm.dtype={dtype}"] if engine == "vllm" else []
    run = make_run(case, setting.models, f"rollout.engine={engine}", f"learner.autocast={autocast}", *few, *own)
    batch = collate(run.sample(1).groups, 1)
    found = run.learner.log_probs(batch)
    run.rollouts.close()
    apart = (found - batch.rollout_log_probs)[batch.response_mask].abs()
    mean, largest = float(apart.mean()), float(apart.max())
    values = {"mean": mean, "largest": largest, "tokens": apart.numel(), "allowed": LOG_PROBS[dtype]}
    text = f"mean {mean:.1e}, largest {largest:.1e}, {apart.numel():,} tokens"
    return Outcome(text, values, passed=mean <= LOG_PROBS[dtype])


def resume(setting: Setting) -> Outcome:
    """Compare the weights and metrics of two 4-step runs and of a run that stops after 2 steps and is resumed for 2 more."""
    folder = Path(tempfile.mkdtemp(prefix="rlzoo-gpu-resume-"))
    whole, again = _trained(folder / "whole", 4), _trained(folder / "again", 4)
    _trained(folder / "parts", 2)
    parts = _trained(folder / "parts", 4, resumed=True)
    between, after = distance(again[0], whole[0]), distance(parts[0], whole[0])
    values = {"between_two_runs": between, "after_resuming": after}
    if after == 0 and parts[1] == whole[1]:
        return Outcome("bit for bit", values, passed=True)
    if between > 0:
        reason = f"two uninterrupted runs also differ, by {between:.1e}: this device's kernels sum in a varying order"
        return Outcome(f"differs by {after:.1e}; {reason}", values, passed=after <= 10 * between)
    return Outcome(f"weights differ by {after:.1e}, though two uninterrupted runs are equal", values, passed=False)


def _trained(folder: Path, steps: int, *, resumed: bool = False) -> tuple[dict[str, Any], list[dict[str, float]]]:
    """Train the embedded model. Return its weights and all metrics of the run except times."""
    from safetensors.torch import load_file

    import rlzoo

    small = ["rollout.num_prompts=8", "rollout.max_new_tokens=24", "checkpoint.every=2"]
    quiet = ["eval.num_problems=0", "tracking.mlflow=false", "learner.lr=1e-4"]
    config = rlzoo.RunConfig.compose(clip="fspo", overrides=[*small, *quiet], steps=steps, output=folder)
    result = rlzoo.train(config, resume=resumed)
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [
        {name: value for name, value in json.loads(line).items() if not name.startswith(("time/", "throughput/"))}
        for line in lines
    ]
    weights = load_file(result.path / "checkpoints" / f"step-{steps:06d}" / "model.safetensors")
    return weights, rows


def memory(setting: Setting, checkpointing: bool) -> Outcome:
    """Compare the learner's peak memory with the planner's forecast."""
    from examples.lab.measure_planner import QUICK, measure
    from examples.lab.measure_planner import WIDE as LARGE

    shape = {name: size for name, size in QUICK["float32"].items() if name != "settings"} if setting.quick else {**LARGE}
    found = measure(settings=["learner.gradient_checkpointing=true"] if checkpointing else [], **shape)
    off = found["measured"] / found["predicted"] - 1
    text = f"{found['measured'] / 1e6:.0f} MB, forecast {found['predicted'] / 1e6:.0f} MB ({off:+.0%})"
    return Outcome(text, {**found, "allowed": FORECAST}, passed=abs(off) <= FORECAST)


CASES = [
    *(
        Case(f"gradient-{rule}-{dtype}", f"gradient of {rule}, {dtype}, against float64", f"{ORACLE[dtype]:.0e}",
             partial(gradient, rule=rule, dtype=dtype))
        for dtype in DTYPES for rule in oracle.RULES
    ),
    *(
        Case(f"{way}-{dtype}", f"gradient with other {way}, {dtype}, against float64", f"{WAYS[dtype]:.0e}",
             partial(other_way, way=way, dtype=dtype))
        for dtype in DTYPES for way in OTHER_WAYS
    ),
    *(
        Case(f"log-probs-{engine}-{dtype}", f"log-probs of engine `{engine}` against the learner's, {dtype}",
             f"mean {LOG_PROBS[dtype]:.0e}", partial(log_probs, engine=engine, dtype=dtype))
        for dtype in DTYPES for engine in ("hf", "generate", "vllm")
    ),
    Case("resume", "4 steps against 2, and 2 after resuming", "bit for bit, or the reason", resume),
    Case("memory", "peak of the learner's memory", f"{FORECAST:.0%} of the forecast", partial(memory, checkpointing=False)),
    Case("memory-checkpointing", "the same with gradient checkpointing", f"{FORECAST:.0%} of the forecast",
         partial(memory, checkpointing=True)),
]  # fmt: skip
"""The cases, in the order in which they run."""
