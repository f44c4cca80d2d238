"""Stores the set of tokens that top-k and top-p kept for each drawn token."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor


def _packed(values: Tensor) -> str:
    return base64.urlsafe_b64encode(values.numpy().tobytes()).decode()


def _unpacked(text: object) -> Tensor:
    return torch.from_numpy(np.frombuffer(base64.urlsafe_b64decode(str(text)), np.int32).copy())


Packed = Annotated[Tensor, PlainValidator(_unpacked), PlainSerializer(_packed)]
"""An int32 tensor, encoded as base64 in JSON."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The IDs of the candidates from which the sampler drew each of N tokens.

    An empty set stands for the whole vocabulary or for a token that the model did not choose.

    Example:
        >>> sets = KeptSets.of([2, 0, 3], [1, 0, 2])
        >>> sets.mask(4).int().tolist()
        [[0, 0, 1, 0], [1, 1, 1, 1], [1, 0, 0, 1]]
    """

    ids: Packed  # (K,) int32, the concatenated IDs of all sets
    sizes: Packed  # (N,) int32, with sum K

    def __len__(self) -> int:
        return len(self.sizes)

    __hash__ = None  # type: ignore[assignment]  # unhashable, because it holds tensors

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeptSets) and torch.equal(self.ids, other.ids) and torch.equal(self.sizes, other.sizes)

    @classmethod
    def of(cls, ids: Sequence[int], sizes: Sequence[int]) -> KeptSets:
        """Build the sets from lists."""
        return cls(torch.tensor(ids, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int32))

    @classmethod
    def of_mask(cls, mask: Tensor) -> KeptSets:
        """Convert a mask ``(N, V)`` to sets on the CPU. A row that is True everywhere is stored as an empty set."""
        partial = mask & ~mask.all(dim=-1, keepdim=True)
        return cls(partial.nonzero()[:, 1].int().cpu(), partial.sum(dim=-1).int().cpu())

    @classmethod
    def join(cls, collections: Iterable[KeptSets]) -> KeptSets:
        """Concatenate one or more collections of sets."""
        pairs = [(sets.ids, sets.sizes) for sets in collections]
        return cls(torch.cat([ids for ids, _ in pairs]), torch.cat([sizes for _, sizes in pairs]))

    def to(self, device: torch.device | str) -> KeptSets:
        """Move the sets to a device."""
        return KeptSets(self.ids.to(device), self.sizes.to(device))

    def first(self, number: int) -> KeptSets:
        """Return a copy of the first ``number`` sets."""
        sizes = self.sizes[:number].clone()  # copied, because pickling a view also pickles the tensor that it views
        return KeptSets(self.ids[: int(sizes.sum())].clone(), sizes)

    def select(self, index: Tensor) -> KeptSets:
        """Return the sets at the given indices ``(M,)``, in the order of the indices."""
        sizes = self.sizes[index]
        return KeptSets(self.ids[ranges((self.sizes.cumsum(0) - self.sizes)[index], sizes)], sizes)

    def split(self, number: int | list[int]) -> list[KeptSets]:
        """Split into collections of ``number`` sets each (the last may be smaller) or of the given sizes."""
        sizes = torch.split(self.sizes, number)
        ids = torch.split(self.ids, [int(size.sum()) for size in sizes])
        return [KeptSets(*pair) for pair in zip(ids, sizes, strict=True)]

    def mask(self, vocabulary: int) -> Tensor:
        """Return the sets as a mask ``(N, V)`` that is True on their tokens."""
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


def by_response(columns: Sequence[tuple[Tensor, KeptSets]], number: int) -> list[KeptSets]:
    """Return the sets of each of ``number`` responses, in the order of the tokens.

    Args:
        columns: for each token position in order, the responses ``(R,)`` that have a token there, and their R sets.
        number: number of responses.
    """
    rows = torch.cat([row.cpu() for row, _ in columns])
    sets = KeptSets.join(sets for _, sets in columns).select(rows.argsort(stable=True))
    return sets.split(torch.bincount(rows, minlength=number).tolist())
