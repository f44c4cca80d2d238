"""What a run recorded: the inputs of every update, as its policy read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.fairness import bin_edges
from rlzoo.lab.rollout_file import read_rollouts
from rlzoo.policy import ClipPolicy
from rlzoo.reductions import StepCounts
from rlzoo.support.seeds import LEARNER, step_seed
from rlzoo.types import ClipInputs

CHUNK_TOKENS = 500_000  # padded tokens judged at once by rules that look at each row alone


@dataclass(frozen=True, slots=True)
class RecordedUpdate:
    """One optimizer step.

    Example:
        ``policy(update.inputs)`` is what a policy would have answered.
    """

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
    """The updates of a run, in order, and how it was configured.

    Example:
        ``RecordedRun.read(Path("runs/mine")).updates[0].inputs``
    """

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


def _updates(file: Path, config: RunConfig) -> Iterator[RecordedUpdate]:
    tensors, step = read_rollouts(file), int(file.stem)
    if "rows/0" not in tensors:
        return  # nothing was learned in this step
    lengths = tensors["lengths"]
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    sequences = torch.split(tensors["sequences"], tensors["sequence_lengths"].tolist())
    advantages = _spread(tensors["advantages"], mask) if tensors["advantages"].ndim == 1 else tensors["advantages"]
    old, sampled = (_spread(tensors[name], mask) for name in ("old_log_probs", "rollout_log_probs"))
    correction = config.mismatch.build()
    weights = None if correction is None else correction(old - sampled, mask)
    seed, edges, index = step_seed(config.seed, LEARNER, step), bin_edges(lengths), 0
    while f"rows/{index}" in tensors:
        rows = tensors[f"rows/{index}"]
        inputs = ClipInputs(
            log_probs=_spread(tensors[f"log_probs/{index}"], mask[rows]),
            old_log_probs=old[rows],
            advantages=advantages[rows],
            response_mask=mask[rows],
            rollout_log_probs=sampled[rows],
            seed=seed + index,
        )
        picked = tuple(sequences[row] for row in rows.tolist())
        group, factors = tensors["group_ids"][rows], None if weights is None else weights[rows]
        yield RecordedUpdate(step, index, edges, inputs, group, picked, factors)
        index += 1


def _spread(flat: Tensor, mask: Tensor) -> Tensor:
    """Values of response tokens, ``(N,)`` row by row, laid out as ``(R, T)`` with 0 on the padding."""
    return torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat)


def chunks(updates: Sequence[RecordedUpdate]) -> list[ClipInputs]:
    """The inputs of all updates in few pieces, for rules that judge each row by itself; each as wide as in the run."""
    pieces: list[ClipInputs] = []
    by_width: dict[int, list[ClipInputs]] = {}
    for update in updates:
        waiting = by_width.setdefault(update.inputs.log_probs.shape[1], [])
        waiting.append(update.inputs)
        if sum(inputs.log_probs.numel() for inputs in waiting) >= CHUNK_TOKENS:
            pieces.append(_joined(waiting))
            waiting.clear()
    return pieces + [_joined(waiting) for waiting in by_width.values() if waiting]


def _joined(parts: Sequence[ClipInputs]) -> ClipInputs:
    return ClipInputs(
        log_probs=torch.cat([part.log_probs for part in parts]),
        old_log_probs=torch.cat([part.old_log_probs for part in parts]),
        advantages=torch.cat([part.advantages for part in parts]),
        response_mask=torch.cat([part.response_mask for part in parts]),
        rollout_log_probs=torch.cat([part.rollout_log_probs for part in parts if part.rollout_log_probs is not None]),
        seed=parts[0].seed,
    )
