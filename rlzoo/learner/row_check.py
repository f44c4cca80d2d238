"""Checks before the first step that the learner computes the same log-probs for a probe's rows as plain passes do."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from rlzoo.config.sections import LearnerConfig
from rlzoo.core.errors import UserError
from rlzoo.learner.batch import collate
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import MicroBatches
from rlzoo.models.probe import MODEL_ERRORS, Probe, evaluation_mode, excess, rounding
from rlzoo.rollout.types import Rollout, RolloutGroup
from rlzoo.tasks.problem import Problem

logger = logging.getLogger("rlzoo")


def check_rows(
    micro_batches: MicroBatches, model: torch.nn.Module, module: ResponseLogProbs, config: LearnerConfig, probe: Probe
) -> None:
    """Compute a probe's rows as the run does, with its padding or packing, training mode, data type and shards.

    If the check passes only for rows of equal length, ``micro_batches`` then keeps different lengths in separate micro-batches.

    Every process computes all rows, because collective operations wait for all processes.

    Raises:
        UserError: the log-probs differ from those of plain passes; the message names the setting that changes them.
    """
    name, temperature = type(module.language_model).__name__, module.temperature
    module.temperature = 1.0
    # use no more tokens than a micro-batch of the run may have, so that they fit in memory
    share = min(1.0, micro_batches.max_tokens / (len(probe.rows) * len(probe.rows[-1])))
    together = [row[: max(2, int(len(row) * share))] for row in probe.rows]
    even = [row[: len(together[1])] for row in together[1:]]
    try:
        problem = _problem(micro_batches, model, module, probe, together)
        problem = problem or (share < 1 and _problem(micro_batches, model, module, probe, probe.rows[-1:])) or ""
        if not problem:
            return
        if config.gradient_checkpointing:
            with evaluation_mode(module):
                works = not _problem(micro_batches, model, module, probe, together)
            if works:
                cause = f"learner.gradient_checkpointing=true: {name} needs training mode to recompute activations, which"
                raise UserError(f"{cause} {problem}; set it to false")
        alone = _problem(micro_batches, model, module, probe, probe.rows[-1:])
        if config.packing and not alone:
            attention = module.language_model.config._attn_implementation
            raise UserError(
                f"learner.packing: {name} with attention {attention!r} mixes packed rows, which {problem}; "
                "choose another model.attn_implementation, or set learner.packing=false"
            )
        if alone or _problem(micro_batches, model, module, probe, even):
            advice = (
                "set learner.autocast=none, or choose another model" if config.autocast != "none" else "choose another model"
            )
            raise UserError(f"model.path: computing {name}'s rows together in the learner {problem}; {advice}")
    finally:
        module.temperature = temperature
    micro_batches.keeps_lengths_apart = True
    logger.warning("%s: computing rows of different lengths together %s; each micro-batch will have one length", name, problem)


@torch.no_grad()
def _problem(
    micro_batches: MicroBatches, model: torch.nn.Module, module: ResponseLogProbs, probe: Probe, rows: Sequence[tuple[int, ...]]
) -> str:
    """Describe any problem that arises when ``rows``, prefixes of a probe's last rows, are computed in one micro-batch."""
    rollouts = (Rollout(row[:1], row[1:], (0.0,) * (len(row) - 1), "", finished=True, policy_version=0) for row in rows)
    batch, number = collate([RolloutGroup(Problem("", ""), tuple(rollouts))]), torch.arange(len(rows))
    eps = max(probe.precision, torch.finfo(torch.bfloat16).eps if micro_batches.autocasts else 0.0)

    def noise() -> Tensor:
        with evaluation_mode(module):  # otherwise, random numbers could be mistaken for rounding
            plain = micro_batches.forward(model, batch, number)[0].cpu()
            with rounding(eps):
                return (micro_batches.forward(model, batch, number)[0].cpu() - plain).abs()[batch.response_mask]

    try:
        actual = micro_batches.forward(model, batch, number)[0].cpu()
        for values, size, expected in zip(actual, batch.lengths.tolist(), probe.log_probs[-len(rows) :], strict=True):
            if nats := excess(values[:size], expected[:size], eps, noise):
                return f"moves log-probs by {nats:.2g} nats"
    except MODEL_ERRORS as error:
        return f"fails ({type(error).__name__}: {error})"
    return ""
