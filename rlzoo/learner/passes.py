"""Passes of a model over rows of an experience: in micro-batches, every process its share, the results added up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlzoo.learner.batch import Experience, PaddingSide
from rlzoo.processes import deal

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass.

    Example:
        ``MicroBatch(rows, is_idle=True)``: computed so that this process keeps step with the others, and not counted.
    """

    rows: Tensor
    is_idle: bool


class Passes:
    """How rows are cut, laid out and shared among processes; each of them holds the whole experience.

    Example:
        ``log_probs, entropy = passes.log_probs(model, experience, torch.arange(len(experience)))``
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        pad_id: int,
        max_tokens: int,
        packing: bool,
        cost: int,
        padding_side: PaddingSide = "right",
    ) -> None:
        self.accelerator = accelerator
        self.pad_id = pad_id
        self.max_tokens = max_tokens
        self.packing = packing
        self.cost = cost  # of a micro-batch beside its tokens, in tokens
        self.padding_side: PaddingSide = padding_side

    def micro_batches(self, experience: Experience, rows: Tensor) -> list[MicroBatch]:
        """This process's micro-batches; as many as the process with the most has, with idle ones at the end.

        Collective operations in a forward or backward pass wait for all processes.
        """
        if not len(rows):
            return []
        lengths = experience.sizes
        shares = deal(rows, lengths, self.accelerator.num_processes)
        cut = [list(experience.micro_batches(share, self.max_tokens, self.packing, self.cost)) for share in shares]
        own = [MicroBatch(piece, is_idle=False) for piece in cut[self.accelerator.process_index]]
        shortest = torch.tensor([min(rows.tolist(), key=lambda row: lengths[row])])
        return own + [MicroBatch(shortest, is_idle=True)] * (max(map(len, cut)) - len(own))

    def forward(self, model: nn.Module, experience: Experience, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs, with gradient, and entropies of these rows' responses, ``(R, T)`` with 0 on the padding."""
        padded = not self.packing
        batch = experience.model_batch(rows, self.pad_id, self.padding_side) if padded else experience.packed_batch(rows)
        log_probs, entropy = model(batch.to(self.accelerator.device))
        return experience.scatter(rows, log_probs), experience.scatter(rows, entropy)

    @torch.no_grad()
    def log_probs(self, model: nn.Module, experience: Experience, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies ``(B, T)`` of some rows, 0 elsewhere; of all processes, on the CPU."""
        both = torch.zeros(2, *experience.response_mask.shape)
        for piece in self.micro_batches(experience, rows):
            log_probs, entropy = self.forward(model, experience, piece.rows)
            if not piece.is_idle:
                both[:, piece.rows] = torch.stack([log_probs, entropy]).float().cpu()
        whole = self.sum(both)
        return whole[0], whole[1]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes of a tensor of theirs, on the CPU."""
        if self.accelerator.num_processes == 1:
            return tensor
        total: Tensor = self.accelerator.reduce(tensor.to(self.accelerator.device), reduction="sum")
        return total.cpu()

    def any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        return bool(self.sum(torch.tensor(float(flag))))
