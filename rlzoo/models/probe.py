"""Checks that a model's log-probs for a row depend only on that row, and not on how the row is computed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlzoo.core.errors import UserError
from rlzoo.core.settings import flatten
from rlzoo.models.pretrained import context_length

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

REACH = 64
"""Length in tokens of a probe's longest row, unless the run or the model's configuration requires another length."""

ROW_FLOP = {"cpu": 5e10}
"""Maximum number of floating-point operations for the longest row of a probe. On other devices, it is 1000 times as large.

A probe computes about ten such rows. This takes half a minute on one slow core, and always less than a step of the run.
"""

ROW_LOGITS = 2**28
"""Maximum number of logits in a row of a probe, which is 1 GB in float32."""

TOLERANCE = 2e-3
"""Allowed log-prob difference in nats. Rounding errors are a hundred times smaller in float32 but larger in bfloat16."""

MODEL_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that models raise for inputs that they do not support."""

# settings whose value is a number of tokens at which the computation of a row changes
_BORDER = re.compile(
    r"(^|\.)(?!num_|max_window|chunk_size_feed)[^.]*(window|chunk|block|top_?k|compress|stride|local|distance)"
)
_SWITCHING = ("longrope", "su", "dynamic")  # rotary embeddings that depend on the longest row of a pass


@dataclass(frozen=True)
class Probe:
    """Rows of different lengths and their log-probs in plain passes of the model, which compute one row at a time."""

    rows: tuple[tuple[int, ...], ...]  # token IDs, with the longest row last
    log_probs: tuple[Tensor, ...]  # (S - 1,) each, float32 on the CPU, for every token but the first
    precision: float  # relative precision of these passes; the parameters of a sharded model may have another data type

    @classmethod
    def of(cls, model: PreTrainedModel, longest: int | None = None) -> Probe:
        """Score rows in plain passes, and check that a token's log-prob depends only on this token and those before it.

        Args:
            model: the model as it was loaded, without an adapter and unsharded.
            longest: length in tokens of the longest row that the run may need; None without a run.

        Raises:
            UserError: the model fails or has non-finite logits, or is not repeatable, causal and independent of earlier passes.
        """
        length, usable, rng = _reach(model, longest), _usable_ids(model), torch.Generator().manual_seed(0)
        lengths = sorted({max(2, min(8, length // 4)), max(2, length // 3), -(-length * 2 // 3), length})
        places = [torch.randint(len(usable), (number,), generator=rng) for number in lengths]
        rows = [tuple(usable[indices].tolist()) for indices in places]
        probe = cls(tuple(rows), tuple(plain_log_probs(model, row) for row in rows), precision(model))
        if any(bool(values.isnan().any()) for values in probe.log_probs):
            raise UserError(f"model.path: {type(model).__name__} has logits that are not finite; choose another model or dtype")
        cut = length - length // 3
        changed = rows[-1][:cut] + tuple(usable[(places[-1][cut:] + 1) % len(usable)].tolist())
        _check(model, probe, changed=changed, cut=cut, longest=longest or length)
        return probe


def _check(model: PreTrainedModel, probe: Probe, *, changed: Sequence[int], cut: int, longest: int) -> None:
    """Raise `UserError` if log-probs vary in plain passes. ``changed`` is the longest row, altered from ``cut`` on."""
    rows, log_probs, name, switch = probe.rows, probe.log_probs, type(model).__name__, rotary_switch(model)
    again = "is not repeatable: the same row gets other log-probs", "choose a model that draws no random numbers"
    causal = (
        "is not causal: later tokens move a log-prob",
        "choose a causal model (for models like BERT, set is_decoder=true in config.json)",
    )
    earlier = "depends on earlier passes: after a longer row, a row gets other log-probs", "choose another model"
    questions = [
        (again, rows[-1], rows[-1], log_probs[-1]),
        *((earlier, row, row, expected) for row, expected in zip(rows[:-1], log_probs[:-1], strict=True)),
        (causal, changed, rows[-1], log_probs[-1][:cut]),  # a model that sees one token ahead would know the next token
        *((causal, rows[i] + rows[-1][len(rows[i]) :], None, log_probs[i]) for i in (0, -2)),
    ]
    eps = precision(model)
    limit = (
        f"its rotary embedding changes at {switch} tokens: set rollout.max_new_tokens so that rows (now up to {longest} tokens)"
    )
    for (problem, advice), row, targets, expected in questions:
        actual = plain_log_probs(model, row, targets)[: len(expected)]
        # noise would hide a model's random draws, so the same row may differ only by the precision
        noise = (lambda: torch.tensor([eps])) if row is rows[-1] else partial(noise_of, model, rows[-1], log_probs[-1])
        nats = excess(actual, expected, eps, noise)
        if row is changed:
            nats = nats or excess(actual[-1:], expected[-1:], eps, noise)
        if nats:
            remedy = f"{limit} have at most {switch}" if switch and longest > switch else advice
            raise UserError(f"model.path: {name} {problem} (by {nats:.2g} nats); {remedy}")
    if switch and len(rows[-1]) <= switch < longest:
        raise UserError(f"model.path: {name} is not causal in rows of more than {switch} tokens; {limit} have at most {switch}")


def excess(actual: Tensor, expected: Tensor, eps: float, noise: Callable[[], Tensor]) -> float:
    """Return the difference in nats between two rows' log-probs if rounding does not explain it, otherwise 0.

    Args:
        actual: ``(S,)``.
        expected: ``(S,)``.
        eps: relative precision. If it is coarse, single tokens are ignored, because rounding may route them to other experts.
        noise: a function that returns the differences caused by rounding.
    """

    def size(differences: Tensor) -> float:
        return float(differences.quantile(0.75, interpolation="lower") if eps > 1e-5 else differences.max())

    difference = (actual - expected).abs()
    for nats in (size(difference), size(difference[-8:])):  # the last tokens, because a model may see a few tokens ahead
        if not nats <= TOLERANCE and not (eps > 1e-5 and nats <= TOLERANCE + 3 * size(noise())):
            return nats
    return 0.0


@torch.no_grad()
def plain_log_probs(model: PreTrainedModel, row: Sequence[int], targets: Sequence[int] | None = None) -> Tensor:
    """Return the log-probs ``(S - 1,)`` that a plain pass gives to a row's tokens (or to ``targets``) except the first.

    Raises:
        UserError: the model fails.
    """
    ids = torch.tensor([row], device=model.device)
    wanted = torch.tensor(row if targets is None else targets, device=model.device)[1:, None]
    try:
        with evaluation_mode(model):
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    except MODEL_ERRORS as error:
        problem = f"{type(model).__name__} fails on a row of {len(row)} tokens ({type(error).__name__}: {error})"
        raise UserError(f"model.path: {problem}; choose another model, or shorter rows") from error
    number = max(1, 2**24 // logits.shape[-1])  # number of rows of logits to convert to float32 at a time
    chunks = zip(torch.split(logits, number), torch.split(wanted, number), strict=True)
    log_probs = torch.cat([some.float().log_softmax(-1).gather(-1, tokens)[:, 0] for some, tokens in chunks])
    return log_probs.clamp(min=-1e6).cpu()  # log-probs of tokens with probability 0 are finite, as in the learner


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into evaluation mode inside the block, and restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def rounding(eps: float) -> Iterator[None]:
    """Inside the block, perturb the outputs of modules without children as rounding with relative precision ``eps`` would."""
    generators: dict[torch.device, torch.Generator] = {}

    def perturb(module: nn.Module, _: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point() or any(True for _ in module.children()):
            return output
        rng = generators.setdefault(output.device, torch.Generator(output.device).manual_seed(0))
        noise = torch.randn(output.shape, generator=rng, device=output.device)
        return output + (output * (eps / 2 * noise)).to(output.dtype)

    handle = nn.modules.module.register_module_forward_hook(perturb)
    try:
        yield
    finally:
        handle.remove()


def rotary_switch(model: PreTrainedModel) -> int | None:
    """Return the row length above which the rotary embedding of a whole pass changes, or None if it never changes."""
    config = model.config.get_text_config()
    settings = flatten(config.to_dict())
    kinds = [key.rpartition(".")[0] for key, value in settings.items() if key.endswith("type") and value in _SWITCHING]
    switches = (settings.get(f"{kind}.original_max_position_embeddings") or config.max_position_embeddings for kind in kinds)
    return min(switches, default=None)


def _reach(model: PreTrainedModel, longest: int | None) -> int:
    """Return the length of a probe's longest row: the run's maximum or, if too expensive, a length beyond every border."""
    config, switch = model.config.get_text_config(), rotary_switch(model)
    borders = _borders(config)
    if longest is None:
        longest = min(
            max([REACH, *(border * 9 // 8 + 8 for border in borders)]), context_length(model) or 2**31, switch or 2**31
        )
    flop = ROW_FLOP.get(model.device.type, 1000 * ROW_FLOP["cpu"])
    affordable = min(flop / (2 * model.num_parameters()), ROW_LOGITS / config.vocab_size)
    crossed = max((border * 9 // 8 + 8 for border in {*borders, switch or 0} if border < longest), default=0)
    return max(4, min(longest, max(REACH, int(min(crossed, 4 * affordable)), int(affordable))))


def _borders(config: PreTrainedConfig) -> set[int]:
    """Return the numbers of tokens, such as window or block sizes, at which the computation of a row changes."""
    numbers = {key: value for key, value in flatten(config.to_dict()).items() if _BORDER.search(key) and type(value) is int}
    rates = [value for key, value in numbers.items() if "compress" in key or "block" in key]
    # an index selects among compressed tokens or blocks
    products = {value * rate for key, value in numbers.items() if re.search("index.*top", key) for rate in rates}
    return {number for number in (*numbers.values(), *products) if number > 1}


def _usable_ids(model: PreTrainedModel) -> Tensor:
    """Return the IDs, ``(N,)``, that are in the embedding and are not configured as special tokens."""
    size = model.config.get_text_config().vocab_size
    settings = [config.to_dict() for config in (model.config, model.generation_config) if config]
    items = [item for section in settings for item in flatten(section).items() if re.search("token_(id|index)", item[0])]
    special = {token for _, value in items for token in (value if isinstance(value, list) else [value])}
    size = min(size, getattr(model.get_input_embeddings(), "num_embeddings", size))
    return torch.tensor([token for token in range(size) if token not in special] or range(size))


def precision(model: PreTrainedModel) -> float:
    """Return the relative precision of a model's matrix products."""
    coarse = model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return max(torch.finfo(model.dtype).eps, 2**-10 if coarse else 0.0)


def noise_of(model: PreTrainedModel, row: Sequence[int], log_probs: Tensor) -> Tensor:
    """Return the differences ``(S - 1,)`` that rounding causes in a row's log-probs in a plain pass."""
    with rounding(precision(model)):
        return (plain_log_probs(model, row) - log_probs).abs()
