"""The recording of a run: the inputs of every update, as its policy read them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlzoo.config.run_config import RunConfig
from rlzoo.corrections import CorrectionInputs
from rlzoo.errors import UserError
from rlzoo.fairness import bin_edges
from rlzoo.policy import ClipPolicy
from rlzoo.reductions import StepCounts
from rlzoo.support.reading import opened
from rlzoo.support.seeds import LEARNER, step_seed
from rlzoo.types import ClipInputs

LONGEST_STEP = 9  # digits of a step, which is the name of its file
OPTIONAL = ("old_entropy", "ref_log_probs")  # per token, recorded where the run computed them
MOST_CELLS = 2**27  # responses times the length of the longest: the size of the padded tensors


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """One optimizer step."""

    step: int
    index: int  # within the step, from 0
    edges: Tensor  # (K + 1,) length bins of the rollout batch, in tokens
    inputs: ClipInputs
    group: Tensor  # (R,) int64, which prompt of its step each response answers
    sequences: tuple[Tensor, ...]  # R rows of prompt and response ids, ragged
    weights: Tensor | None = None  # (R, 1) or (R, T) factors of the objective, where the run corrected for its sampler

    def weights_for(self, policy: ClipPolicy) -> Tensor | None:
        """Factors of a rule's objective; None for a rule whose ratio is to the sampler, which corrects for it already."""
        return None if policy.ratio_to_sampler else self.weights

    @property
    def counts(self) -> StepCounts:
        """The step's denominators."""
        lengths = self.inputs.response_mask.sum(-1)
        return StepCounts(int((lengths > 0).sum()), int(lengths.sum()))


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """The updates of a run, in order, and how it was configured."""

    path: Path
    config: RunConfig
    updates: tuple[RecordedUpdate, ...]

    @classmethod
    def read(cls, path: Path) -> RecordedRun:
        """Read a run directory.

        Raises:
            UserError: it is not one, or nothing was learned in it.
        """
        if not (path / "config.yaml").is_file():
            raise UserError(f"{str(path)!r} is not a run directory: it has no config.yaml")
        try:
            config = RunConfig.compose([path / "config.yaml"])
        except UserError as error:
            raise UserError(f"{str(path)!r} has a config.yaml that describes no run: {error}") from error
        updates = [
            update
            for file in sorted((path / "rollouts").glob("*.safetensors"))
            if not file.name.startswith(".")  # of a desktop, such as ._000001.safetensors
            for update in _updates(file, config)
        ]
        if not updates:
            raise UserError(f"{str(path)!r} has no recorded updates to replay")
        return cls(path, config, tuple(updates))

    @property
    def num_responses(self) -> int:
        """Responses over all updates; one that was learned from twice counts twice."""
        return sum(len(update.group) for update in self.updates)


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Raise a `UserError` if the block cannot read a safetensors file."""
    try:
        with opened(file, sys.maxsize):  # refuses what is no file; safetensors maps it, whatever its size
            yield
    # safetensors raises different errors for different damage, torch a RuntimeError for weights of another model
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {error}; remove it to go without it") from error


def _updates(file: Path, config: RunConfig) -> Iterator[RecordedUpdate]:
    """Read the updates of one step; a `UserError` if the file does not hold what `RunDirectory.record_rollouts` writes."""
    if not (file.stem.isdecimal() and file.stem.isascii() and len(file.stem) <= LONGEST_STEP):
        raise UserError(f"{str(file)!r} is not named after a step, such as 000001.safetensors; remove it")
    with readable(file):
        tensors: dict[str, Tensor] = load_file(file)
    num_updates = next(index for index in itertools.count() if f"rows/{index}" not in tensors)
    if num_updates == 0:
        return  # nothing was learned in this step
    try:
        _check(tensors, num_updates)
    except ValueError as error:
        raise UserError(f"{str(file)!r} does not hold what a run records: {error}; remove it to go without it") from error
    step, lengths = int(file.stem), tensors["lengths"]
    turn_ids = _turns(tensors)
    mask = turn_ids >= 0
    sequences = torch.split(tensors["sequences"], tensors["sequence_lengths"].tolist())
    advantages = _spread(tensors["advantages"], mask) if tensors["advantages"].ndim == 1 else tensors["advantages"]
    old, sampled = (_spread(tensors[name], mask) for name in ("old_log_probs", "rollout_log_probs"))
    optional = {name: _spread(tensors[name], mask) for name in OPTIONAL if name in tensors}
    optional |= {name: tensors[name][:, None] for name in ("rewards", "finished") if name in tensors}
    starts = tensors.get("prompt_lengths", tensors["sequence_lengths"] - lengths).tolist()
    behind = pad_sequence([sequence[start:] for sequence, start in zip(sequences, starts, strict=True)], batch_first=True)
    optional |= {"group_ids": tensors["group_ids"][:, None], "turn_ids": turn_ids, "token_ids": behind * mask}
    correction = config.correction
    weights = None if correction is None else correction(CorrectionInputs(old, sampled, mask, advantages))
    seed, edges = step_seed(config.seed, LEARNER, step), bin_edges(lengths)
    per_step = config.learner.num_minibatches * config.learner.num_epochs
    for index in range(num_updates):
        rows = tensors[f"rows/{index}"]
        yield RecordedUpdate(
            step,
            index,
            edges,
            ClipInputs(
                log_probs=_spread(tensors[f"log_probs/{index}"], mask[rows]),
                old_log_probs=old[rows],
                advantages=advantages[rows],
                response_mask=mask[rows],
                rollout_log_probs=sampled[rows],
                seed=seed + index,
                max_length=config.rollout.max_new_tokens,
                progress=((step - 1) * per_step + index) / (config.steps * per_step),
                **{name: values[rows] for name, values in optional.items()},
            ),
            group=tensors["group_ids"][rows],
            sequences=tuple(sequences[row] for row in rows.tolist()),
            weights=None if weights is None else weights[rows],
        )


def _turns(tensors: dict[str, Tensor]) -> Tensor:
    """The turn of each token behind the prompts, ``(R, T)``; -1 where the model did not choose it."""
    lengths = tensors["lengths"]
    sizes = tensors["sequence_lengths"] - tensors["prompt_lengths"] if "turn_ids" in tensors else lengths
    behind = torch.arange(int(sizes.max())) < sizes[:, None]
    flat = tensors["turn_ids"] if "turn_ids" in tensors else torch.zeros(int(sizes.sum()), dtype=torch.long)
    return torch.full(behind.shape, -1).masked_scatter(behind, flat)


def _spread(flat: Tensor, mask: Tensor) -> Tensor:
    """Values of response tokens, ``(N,)`` row by row, laid out as ``(R, T)`` with 0 on the padding."""
    return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat)


def _check(tensors: dict[str, Tensor], num_updates: int) -> None:
    """Raise a `ValueError` that says which tensor of a step is wrong."""
    lengths, sizes, groups, sequences = (
        _whole_numbers(tensors, name) for name in ("lengths", "sequence_lengths", "group_ids", "sequences")
    )
    number = len(lengths)
    for name, values in (("sequence_lengths", sizes), ("group_ids", groups)):
        _require(len(values) == number, f"lengths has {number} values and {name} {len(values)}")
    _require(number > 0 and int(lengths.max()) > 0, "lengths has no response")
    for name, values in (("lengths", lengths), ("sequence_lengths", sizes)):  # before they are summed, which may overflow
        _require(int(values.max()) <= len(sequences), f"{name} holds more than there are tokens")
    _require(int(sizes.sum()) == len(sequences), f"sequences has {len(sequences)} values, and sequence_lengths another sum")
    _require(number * int(lengths.max()) <= MOST_CELLS, f"{number} responses of up to {int(lengths.max())} tokens are too many")
    tokens = (int(lengths.sum()),)
    if "turn_ids" in tensors:
        prompts = _whole_numbers(tensors, "prompt_lengths")
        _require(len(prompts) == number and bool((prompts <= sizes).all()), "prompt_lengths does not fit sequence_lengths")
        turns = tensors["turn_ids"]
        _require(turns.dtype == torch.int64 and tuple(turns.shape) == (int((sizes - prompts).sum()),), "turn_ids does not fit")
        chosen = [int((row >= 0).sum()) for row in torch.split(turns, (sizes - prompts).tolist())]
        _require(chosen == lengths.tolist(), "turn_ids names other numbers of tokens than lengths")
    shapes: dict[str, list[tuple[int, ...]]] = {
        "old_log_probs": [tokens],
        "rollout_log_probs": [tokens],
        "advantages": [(number, 1), tokens],
        **{name: [tokens] for name in OPTIONAL if name in tensors},
        **({"rewards": [(number,)]} if "rewards" in tensors else {}),
    }
    if "finished" in tensors:
        shape, kind = tuple(tensors["finished"].shape), tensors["finished"].dtype
        _require(shape == (number,) and kind == torch.bool, f"finished has {kind} values of shape {shape}")
    for index in range(num_updates):
        rows = _whole_numbers(tensors, f"rows/{index}")
        _require(0 < len(rows) <= number, f"rows/{index} has {len(rows)} values for {number} responses")
        _require(int(rows.max()) < number, f"rows/{index} names a response that is not there")
        shapes[f"log_probs/{index}"] = [(int(lengths[rows].sum()),)]
    for name, allowed in shapes.items():
        _require(name in tensors, f"{name} is missing")
        given, shape = tensors[name].dtype, tuple(tensors[name].shape)
        what = f"{name} has {given} values of shape {shape}, not torch.float32 of shape {' or '.join(map(str, allowed))}"
        _require(given == torch.float32 and shape in allowed, what)
        _require(bool(tensors[name].isfinite().all()), f"{name} holds a value that is not finite")


def _whole_numbers(tensors: dict[str, Tensor], name: str) -> Tensor:
    _require(name in tensors, f"{name} is missing")
    tensor = tensors[name]
    is_row = tensor.ndim == 1 and tensor.dtype == torch.int64 and not bool((tensor < 0).any())
    _require(is_row, f"{name} is not one row of whole numbers from 0")
    return tensor


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
