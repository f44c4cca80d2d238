"""The rollout file format, in which any trainer can record sampled responses and their log-probs at every optimizer step.

docs/reference/rollout-files.md describes the format. A run directory contains one file per rollout step.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rlzoo.core.errors import UserError, shown
from rlzoo.core.settings import user_path
from rlzoo.support.atomic import write_tensors
from rlzoo.support.parsing import UnreadableError, parse_json
from rlzoo.support.reading import remedy

FORMAT, VERSION = "rlzoo_rollouts", 2
PARTS = "reward_parts/"  # prefix of the tensors that contain named rewards
PAGE = "docs/reference/rollout-files.md"
PER_TOKEN = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "old_entropy", "values")  # float32, one per chosen token
REQUIRED = ("token_ids", "sequence_lengths", "response_mask", "group_ids")
KEPT = ("kept_ids", "kept_sizes")  # int32
OPTIONAL = ("rewards", "advantages", "turn_ids", "finished", "policy_versions", "last_values", *PER_TOKEN, *KEPT)
INTEGERS = ("token_ids", "sequence_lengths", "group_ids", "turn_ids", "policy_versions")
FLAGS = ("response_mask", "finished")
FACTS = ("step", "learner_version", "temperature", "max_length", "num_steps", "seed", "rule", "model", "writer")
MOST_CELLS = 2**27  # maximum size of the padded tensors: number of responses times the longest length
LARGEST_STEP = 10**9
MOST_TURNS = 2**20
LARGEST_LOG_PROB = 1e-3  # in nats; apart from rounding, a log-probability is at most 0


@dataclass(frozen=True, slots=True)
class UpdateLogProbs:
    """Log-probs from one optimizer step on a rollout batch."""

    rows: Tensor  # (U,) int64: rows of the responses in the update's minibatch
    log_probs: Tensor  # (M_u,) float32: log-probs of these responses' chosen tokens before the optimizer step, row by row


@dataclass(frozen=True, slots=True)
class RolloutFile:
    """A rollout batch of R responses with N tokens in total, including prompts. The model chose M of the tokens.

    All tensors are flat, with the responses concatenated. Values that a trainer does not provide are None.

    Example:
        The model answers a three-token prompt with two tokens:

        >>> step = RolloutFile(
        ...     step=1,
        ...     token_ids=torch.tensor([5, 12, 7, 10, 1]),
        ...     sequence_lengths=torch.tensor([5]),
        ...     response_mask=torch.tensor([False, False, False, True, True]),
        ...     group_ids=torch.tensor([0]),
        ...     rewards=torch.tensor([1.0]),
        ...     rollout_log_probs=torch.tensor([-0.1, -0.9]),
        ... )
        >>> step.lengths.tolist(), step.prompt_lengths.tolist()
        ([2], [3])
    """

    step: int  # rollout step, from 1
    token_ids: Tensor  # (N,) int64
    sequence_lengths: Tensor  # (R,) int64: number of tokens in each prompt and its response
    response_mask: Tensor  # (N,) bool: True on tokens that the model chose
    group_ids: Tensor  # (R,) int64: responses to the same prompt share an ID
    rewards: Tensor | None = None  # (R,) float32; NaN for a response without a grade, which rules do not see
    reward_parts: Mapping[str, Tensor] = field(default_factory=dict)  # (R,) float32 each: named rewards, NaN without a grade
    advantages: Tensor | None = None  # (R,) float32, or (M,) if credit differs by token
    turn_ids: Tensor | None = None  # (M,) int64: turns 0, 1, ...; if None, a new turn starts after every gap in the mask
    finished: Tensor | None = None  # (R,) bool; False if cut off at a limit
    policy_versions: Tensor | None = None  # (R,) or (M,) int64: version of the sampling weights, as a number of optimizer steps
    rollout_log_probs: Tensor | None = None  # (M,) float32, in nats, as reported by the sampler
    old_log_probs: Tensor | None = None  # (M,) under the trainer's model before the first update on the batch
    ref_log_probs: Tensor | None = None  # (M,) under the reference model
    old_entropy: Tensor | None = None  # (M,) in nats, under the same model as old_log_probs
    values: Tensor | None = None  # (M,) the critic's value before each token, computed before the first update
    last_values: Tensor | None = None  # (R,) the critic's value after the last token
    kept_ids: Tensor | None = None  # (K,) int32: the IDs that top-k and top-p kept for each token, concatenated
    kept_sizes: Tensor | None = None  # (M,) int32: number of IDs kept for each token; 0 for the whole vocabulary
    updates: tuple[UpdateLogProbs, ...] = ()
    learner_version: int | None = None  # version before the first update; the staleness is learner_version - policy_versions
    temperature: float = 1.0  # sampling temperature; all log-probs are computed from logits divided by it
    max_length: int | None = None  # maximum number of model tokens in a response
    num_steps: int | None = None  # number of rollout steps in the whole run, from which progress is computed
    seed: int = 0  # seed of the first update; update k has seed + k
    rule: Mapping[str, Any] = field(default_factory=dict)  # name and settings of the training rule, if it comes from rlzoo
    model: str = ""  # name or path of the trained model
    writer: str = ""  # program and version, such as "trl 1.16.0"

    def check(self) -> None:
        """Check that the values are consistent. `from_padded` and `load` call this method.

        Raises:
            ValueError: some values are inconsistent; the message names them.
        """
        _check(self)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens that the model chose in each response, ``(R,)``."""
        ends = self.response_mask.long().cumsum(0)[self.sequence_lengths.cumsum(0) - 1]
        return ends.diff(prepend=ends.new_zeros(1))

    @property
    def prompt_lengths(self) -> Tensor:
        """Number of tokens before the first token that the model chose, ``(R,)``, or the full length if it chose none."""
        rows = torch.repeat_interleave(torch.arange(len(self)), self.sequence_lengths)
        place = torch.arange(len(self.token_ids)) - (self.sequence_lengths.cumsum(0) - self.sequence_lengths)[rows]
        chosen = self.response_mask
        return self.sequence_lengths.scatter_reduce(0, rows[chosen], place[chosen], "amin")

    @property
    def num_bytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @classmethod
    def from_padded(
        cls,
        step: int,
        prompt_ids: Tensor,
        prompt_mask: Tensor,
        completion_ids: Tensor,
        completion_mask: Tensor,
        group_ids: Tensor,
        *,
        response_mask: Tensor | None = None,
        updates: Sequence[tuple[Tensor, Tensor]] = (),
        **values: Any,
    ) -> RolloutFile:
        """Build a step from a trainer's padded tensors, on any device.

        Args:
            step: rollout step, from 1.
            prompt_ids: ``(R, P)``.
            prompt_mask: ``(R, P)``, nonzero on the prompt's tokens. Padding may be on either side.
            completion_ids: ``(R, T)`` tokens after the prompts.
            completion_mask: ``(R, T)``, nonzero on tokens, zero on padding.
            group_ids: ``(R,)``.
            response_mask: ``(R, T)``, nonzero on the tokens that the model chose. The default is the whole completion.
            updates: rows ``(U,)`` and log-probs ``(U, T)`` for each optimizer step.
            **values: other fields. Per-token values are ``(R, T)``.

        Raises:
            ValueError: some values are inconsistent; the message names them.
        """
        present = completion_mask.bool().cpu()
        chosen = present if response_mask is None else response_mask.bool().cpu() & present
        before = prompt_mask.bool().cpu()
        both = torch.cat([before, present], 1)
        for name in (*PER_TOKEN, "turn_ids", "advantages", "policy_versions"):
            value = values.get(name)
            if value is not None and value.ndim == 2:
                values[name] = (
                    value.detach().cpu()[:, 0] if value.shape[1] == 1 != chosen.shape[1] else value.detach().cpu()[chosen]
                )
        parts = {name: part.detach().float().cpu() for name, part in values.pop("reward_parts", {}).items()}
        values = {
            name: value.detach().cpu().to(_data_types(name)[0]) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        recorded = cls(
            step=step,
            token_ids=torch.cat([prompt_ids, completion_ids], 1).long().cpu()[both],
            sequence_lengths=both.sum(1),
            response_mask=torch.cat([torch.zeros_like(before), chosen], 1)[both],
            group_ids=group_ids.long().cpu(),
            reward_parts=parts,
            updates=tuple(
                UpdateLogProbs(rows.long().cpu(), log_probs.detach().float().cpu()[chosen[rows.cpu()]])
                for rows, log_probs in updates
            ),
            **values,
        )
        recorded.check()
        return recorded

    def save(self, file: Path, key: str | None = None) -> None:
        """Write the file atomically, so that it is either complete or absent.

        Args:
            file: path that ends in ``.safetensors``. An existing file is replaced.
            key: random name for the temporary file; see `rlzoo.support.atomic.temporary_path`.
        """
        facts = {"version": VERSION, **{name: value for name in FACTS if (value := getattr(self, name)) is not None}}
        # use a single key, because safetensors writes several keys in random order but equal steps must give equal files
        write_tensors(user_path(file), self._tensors(), key or uuid.uuid4().hex, {FORMAT: json.dumps(facts)})

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {name: value for name in (*REQUIRED, *OPTIONAL) if (value := getattr(self, name)) is not None}
        tensors |= {f"{PARTS}{name}": value for name, value in self.reward_parts.items()}
        for index, update in enumerate(self.updates):
            tensors |= {f"rows/{index}": update.rows, f"log_probs/{index}": update.log_probs}
        return {name: value.contiguous().clone() for name, value in tensors.items()}  # safetensors rejects shared memory

    @classmethod
    def load(cls, file: Path) -> RolloutFile:
        """Read a rollout file.

        Raises:
            UserError: the file is incomplete, has another format, or holds inconsistent tensors; the message says which.
        """
        file = user_path(file)
        with readable(file), safe_open(str(file), "pt") as content:
            facts = (content.metadata() or {}).get(FORMAT)
            tensors = {name: content.get_tensor(name) for name in ([] if facts is None else content.keys())}
        if facts is None:
            raise UserError(f"{str(file)!r} is not a rollout file: its metadata has no {FORMAT!r}; see {PAGE}")
        try:
            step = cls(**_read_facts(facts), **_read_tensors(tensors))
            step.check()
        except ValueError as error:
            raise UserError(f"{str(file)!r} cannot be used as a rollout file: {error}; see {PAGE}") from error
        return step


@contextmanager
def readable(file: Path) -> Iterator[None]:
    """Convert any error from reading the safetensors file inside the block to a `UserError`."""
    try:
        with file.open("rb"):  # safetensors does not distinguish a missing file from an unreadable one
            yield
    # safetensors raises a different error for each kind of damage; torch raises RuntimeError for another model's weights
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        advice = remedy(error, "remove the file to continue without it")
        raise UserError(f"{str(file)!r} cannot be read: {error}; {advice}") from error


def turns(response_mask: Tensor) -> Tensor:
    """Return each token's turn as int64 ``(B, T)``: 0, 1, ... in each row, -1 outside any turn. A gap in the mask ends a turn.

    Args:
        response_mask: ``(B, T)`` bool, True on tokens that the model chose.

    Example:
        >>> turns(torch.tensor([[True, True, False, True], [False, True, False, False]])).tolist()
        [[0, 0, -1, 1], [-1, 0, -1, -1]]
    """
    begins = response_mask & ~torch.nn.functional.pad(response_mask[:, :-1], (1, 0))
    return torch.where(response_mask, begins.long().cumsum(1) - 1, -1)


def _data_types(name: str) -> tuple[torch.dtype, ...]:
    """Return a field's data type, followed by any others that are accepted for it in a file."""
    if name in KEPT:
        return (torch.int32,)
    if name in INTEGERS or name == "rows":
        return torch.int64, torch.int32
    return (torch.bool, torch.uint8) if name in FLAGS else (torch.float32, torch.float64)


def _read_facts(text: str) -> dict[str, Any]:
    """Parse a file's metadata into fields; raise ValueError if the metadata is invalid."""
    try:
        facts = parse_json(text)
    except UnreadableError as error:
        raise ValueError(f"metadata {FORMAT}={shown(text)}: {error}") from error
    if not isinstance(facts, dict):
        raise ValueError(f"metadata {FORMAT}={shown(text)} is not a JSON object")
    if (number := facts.pop("version", None)) not in (1, VERSION):  # version 2 adds named rewards
        raise ValueError(f"it has format version {shown(number)}, but only versions 1 to {VERSION} are supported")
    if "step" not in facts:
        raise ValueError(f"metadata {FORMAT} has no step")
    if unknown := sorted(set(facts) - set(FACTS)):
        raise ValueError(f"metadata {FORMAT} has the unknown key {shown(unknown[0])} (known: {', '.join(FACTS)})")
    return facts


def _read_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert a file's tensors to the data types of their fields; raise ValueError if a tensor is invalid."""
    for name in REQUIRED:
        if name not in tensors:
            raise ValueError(f"{name} is missing")
    values: dict[str, Any] = {name: _converted(name, tensors[name]) for name in (*REQUIRED, *OPTIONAL) if name in tensors}
    parts = {name: _converted(name, tensor) for name, tensor in tensors.items() if name.startswith(PARTS)}
    updates: list[UpdateLogProbs] = []
    while f"rows/{len(updates)}" in tensors:
        index = len(updates)
        if f"log_probs/{index}" not in tensors:
            raise ValueError(f"log_probs/{index} is missing")
        rows, log_probs = (_converted(name, tensors[f"{name}/{index}"]) for name in ("rows", "log_probs"))
        updates.append(UpdateLogProbs(rows, log_probs))
    known = {*REQUIRED, *OPTIONAL, *(f"{name}/{index}" for name in ("rows", "log_probs") for index in range(len(updates)))}
    if unknown := sorted(set(tensors) - known - set(parts)):
        raise ValueError(f"{unknown[0]} is not part of the format, or an earlier update is missing")
    named = {name.removeprefix(PARTS): part for name, part in parts.items()}
    return {**values, "reward_parts": named, "updates": tuple(updates)}


def _converted(name: str, tensor: Tensor) -> Tensor:
    """Convert a tensor from an accepted data type to the data type of its field."""
    allowed = _data_types(name)
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} has data type {tensor.dtype}, not {' or '.join(map(str, allowed))}")
    return tensor.to(allowed[0])


def _check(step: RolloutFile) -> None:
    """Raise ValueError if the values of a step are inconsistent."""
    _check_facts(step)
    for name in (*REQUIRED, *OPTIONAL):
        value = getattr(step, name)
        if value is not None:
            _require(value.ndim == 1, f"{name} has shape {tuple(value.shape)}, but must have one dimension")
            _require(name not in (*INTEGERS, *KEPT) or not bool((value < 0).any()), f"{name} has a negative value")
            is_bad = value.isinf() if name == "rewards" else ~value.isfinite()
            _require(not value.is_floating_point() or not bool(is_bad.any()), f"{name} has a value that is not finite")
    sizes, number, num_tokens = step.sequence_lengths, len(step), len(step.token_ids)
    _require(number > 0, "sequence_lengths is empty")
    # checked before summing, because the sum could overflow
    _require(
        bool((sizes > 0).all()) and int(sizes.max()) <= num_tokens,
        f"sequence_lengths has values outside the range 1 to {num_tokens}",
    )
    _require(
        int(sizes.sum()) == num_tokens, f"sequence_lengths sums to {int(sizes.sum())}, but there are {num_tokens} token_ids"
    )
    _check_length(step, "response_mask", {num_tokens: "token_ids"})
    first = step.response_mask[sizes.cumsum(0) - sizes]
    _require(not bool(first.any()), "response_mask is true on the first token of a sequence, but no earlier token predicts it")
    num_chosen = int(step.response_mask.sum())
    widest = int((sizes - step.prompt_lengths).max())
    what = f"{number} responses of up to {widest} tokens exceed the maximum of {MOST_CELLS:,} padded tokens per step"
    _require(number * widest <= MOST_CELLS, what)
    by_response, by_token = {number: "responses"}, {num_chosen: "tokens that the model chose"}
    for name in ("group_ids", "rewards", "finished", "last_values"):
        _check_length(step, name, by_response)
    for name, part in step.reward_parts.items():
        _require(tuple(part.shape) == (number,), f"{PARTS}{name} has shape {tuple(part.shape)}, not ({number},)")
        _require(not bool(part.isinf().any()), f"{PARTS}{name} has a value that is not finite")
    for name in ("turn_ids", "kept_sizes", *PER_TOKEN):
        _check_length(step, name, by_token)
    for name in ("advantages", "policy_versions"):
        _check_length(step, name, by_token | by_response)
    for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs"):
        if (value := getattr(step, name)) is not None:
            _check_log_probs(name, value)
    _check_kept(step, num_chosen)
    if step.turn_ids is not None:
        in_order = all(bool((ids.diff() >= 0).all()) for ids in torch.split(step.turn_ids, step.lengths.tolist()))
        _require(in_order, "turn_ids decreases within a response; number the turns of a response 0, 1, ... in order")
        largest = int(step.turn_ids.max()) if num_chosen else 0
        _require(largest < MOST_TURNS, f"turn_ids contains {largest}, but a response must have fewer than {MOST_TURNS:,} turns")
    for index, update in enumerate(step.updates):
        _check_update(step, index, update)


def _check_length(step: RolloutFile, name: str, allowed: Mapping[int, str]) -> None:
    """Check that a field has one value per item. ``allowed`` maps each allowed number of items to the name of the items."""
    value = getattr(step, name)
    things = " or ".join(f"{number} {what}" for number, what in allowed.items())
    _require(value is None or len(value) in allowed, f"{name} has {0 if value is None else len(value)} values for {things}")


def _check_kept(step: RolloutFile, num_chosen: int) -> None:
    ids, sizes = step.kept_ids, step.kept_sizes
    if ids is None or sizes is None:
        _require(ids is None and sizes is None, f"{'kept_ids' if ids is None else 'kept_sizes'} is missing")
        return
    total = int(sizes.sum())
    _require(total == len(ids), f"kept_sizes sums to {total}, but there are {len(ids)} kept_ids")
    tokens = torch.repeat_interleave(torch.arange(num_chosen), sizes)
    has_own = torch.zeros(num_chosen, dtype=torch.bool)
    has_own[tokens[ids == step.token_ids[step.response_mask][tokens]]] = True
    _require(bool((has_own | (sizes == 0)).all()), "kept_ids lacks a token that the model chose")


def _check_update(step: RolloutFile, index: int, update: UpdateLogProbs) -> None:
    rows, log_probs, number = update.rows, update.log_probs, len(step)
    _require(rows.ndim == 1 and 0 < len(rows) <= number, f"rows/{index} has shape {tuple(rows.shape)} for {number} responses")
    within = bool((rows >= 0).all()) and int(rows.max()) < number
    _require(within, f"rows/{index} names a response that does not exist")
    _require(len(set(rows.tolist())) == len(rows), f"rows/{index} names a response twice")
    wanted = int(step.lengths[rows].sum())
    _require(tuple(log_probs.shape) == (wanted,), f"log_probs/{index} has shape {tuple(log_probs.shape)}, not ({wanted},)")
    _require(bool(log_probs.isfinite().all()), f"log_probs/{index} has a value that is not finite")
    _check_log_probs(f"log_probs/{index}", log_probs)


def _check_log_probs(name: str, values: Tensor) -> None:
    """Reject values that cannot be log-probs, such as probabilities or negated log-probs."""
    most = float(values.max()) if len(values) else 0.0
    _require(most <= LARGEST_LOG_PROB, f"{name} contains {most:.3g}, but a log-probability is at most 0")


def _check_facts(step: RolloutFile) -> None:
    for name, least, most in (
        ("step", 0, LARGEST_STEP),
        ("learner_version", 0, 2**63),
        ("max_length", 1, 2**40),
        ("num_steps", 1, LARGEST_STEP),
        ("seed", 0, 2**63),
    ):
        value = getattr(step, name)
        if value is not None or name in ("step", "seed"):
            _require(
                type(value) is int and least <= value < most, f"{name}={shown(value)} is not a whole number of at least {least}"
            )
    is_number = isinstance(step.temperature, int | float) and not isinstance(step.temperature, bool)
    _require(is_number and 0 < step.temperature < 1e6, f"temperature={shown(step.temperature)} is not a number above 0")
    for name in ("model", "writer"):
        _require(isinstance(getattr(step, name), str), f"{name}={shown(getattr(step, name))} is not a string")
    is_rule = isinstance(step.rule, Mapping) and (not step.rule or isinstance(step.rule.get("name"), str))
    _require(is_rule, f"rule={shown(step.rule)} is not a mapping with a rule's name and settings")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ValueError(problem)
