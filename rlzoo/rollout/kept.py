"""Sets of token ids with different sizes: for each drawn token, the tokens that top-k and top-p kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedSets:
    """N sets of token ids, stored consecutively; an empty set stands for the whole vocabulary.

    Example:
        >>> sets = RaggedSets(torch.tensor([2, 0, 3], dtype=torch.int32), torch.tensor([1, 0, 2]))
        >>> sets.mask(4).int().tolist()
        [[0, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 1]]
    """

    ids: Tensor  # (K,) int32
    sizes: Tensor  # (N,) int64, with sum K

    def __len__(self) -> int:
        return len(self.sizes)

    @classmethod
    def of_mask(cls, mask: Tensor) -> RaggedSets:
        """Convert a mask ``(N, V)`` to sets; a row that is True everywhere is stored as an empty set."""
        partial = mask & ~mask.all(dim=-1, keepdim=True)
        return cls(partial.nonzero()[:, 1].int(), partial.sum(dim=-1))

    @classmethod
    def concat(cls, parts: Iterable[RaggedSets]) -> RaggedSets:
        """Concatenate one or more collections of sets."""
        pairs = [(part.ids, part.sizes) for part in parts]
        return cls(torch.cat([ids for ids, _ in pairs]), torch.cat([sizes for _, sizes in pairs]))

    def to(self, device: torch.device | str) -> RaggedSets:
        """Move the sets to a device."""
        return RaggedSets(self.ids.to(device), self.sizes.to(device))

    def select(self, index: Tensor) -> RaggedSets:
        """Return the sets at the given indices ``(M,)``, in the order of the indices."""
        sizes = self.sizes[index]
        return RaggedSets(self.ids[ranges((self.sizes.cumsum(0) - self.sizes)[index], sizes)], sizes)

    def split(self, number: int | list[int]) -> list[RaggedSets]:
        """Split the sets into parts of ``number`` sets, of which the last may be smaller, or of the given numbers."""
        sizes = torch.split(self.sizes, number)
        ids = torch.split(self.ids, [int(each.sum()) for each in sizes])
        return [RaggedSets(*part) for part in zip(ids, sizes, strict=True)]

    def mask(self, vocabulary: int) -> Tensor:
        """Return the sets as a mask ``(N, V)``, True on their tokens."""
        mask = (self.sizes == 0)[:, None].repeat(1, vocabulary)
        rows = torch.repeat_interleave(torch.arange(len(self), device=self.sizes.device), self.sizes)
        mask[rows, self.ids.long()] = True
        return mask


def ranges(starts: Tensor, sizes: Tensor) -> Tensor:
    """Concatenate the ranges of integers that begin at ``starts`` ``(N,)`` and have ``sizes`` ``(N,)`` elements.

    Example:
        >>> ranges(torch.tensor([7, 0]), torch.tensor([2, 3])).tolist()
        [7, 8, 0, 1, 2]
    """
    shift = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
    return shift + torch.arange(len(shift), device=shift.device)


class SetRecorder:
    """Collects the sets of many responses, one token of each unfinished response at a time."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._sets: list[RaggedSets] = []

    def add(self, rows: Tensor, mask: Tensor) -> None:
        """Add the sets ``(R, V)`` for the next token of each response in ``rows`` ``(R,)``."""
        self._rows.append(rows.cpu())
        self._sets.append(RaggedSets.of_mask(mask).to("cpu"))

    def by_response(self, number: int) -> list[RaggedSets]:
        """Return the sets of each of the ``number`` responses, in the order of the tokens."""
        rows = torch.cat(self._rows)
        sets = RaggedSets.concat(self._sets).select(rows.argsort(stable=True))
        return sets.split(torch.bincount(rows, minlength=number).tolist())
