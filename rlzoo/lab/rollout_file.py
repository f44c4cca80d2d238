"""One step's recorded tensors, read from their file and held to what a run writes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlzoo.errors import UserError
from rlzoo.support.reading import opened

LONGEST_STEP = 9  # digits: a step's number is the name of its file
MOST_CELLS = 2**27  # responses times the longest of them: what they are laid out in for the rules


def read_rollouts(file: Path) -> dict[str, Tensor]:
    """The tensors that `RunDirectory.record_rollouts` wrote.

    Raises:
        UserError: the file cannot be read, or does not hold what a run records; says which tensor is wrong.
    """
    if not (file.stem.isdecimal() and file.stem.isascii() and len(file.stem) <= LONGEST_STEP):
        raise UserError(f"{str(file)!r} is not named after a step, such as 000001.safetensors; remove it")
    try:
        with opened(file, sys.maxsize):  # which refuses what is no file; safetensors maps it, whatever its size
            tensors: dict[str, Tensor] = load_file(file)
    # safetensors' own differ by what is torn
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {error}; remove it to go without this step") from error
    if "rows/0" in tensors:  # else nothing was learned in this step, and nothing of it is read
        for problem in _problems(tensors):
            raise UserError(f"{str(file)!r} does not hold what a run records: {problem}; remove it to go without this step")
    return tensors


def _problems(tensors: dict[str, Tensor]) -> Iterator[str]:
    """What is wrong, such as ``"lengths has 11 values and group_ids 12"``; what follows the first may be nonsense."""
    counts = ("lengths", "sequence_lengths", "group_ids")
    values = ("sequences", "old_log_probs", "rollout_log_probs", "advantages")
    yield from (f"{name} is missing" for name in (*counts, *values) if name not in tensors)
    for name in (*counts, "sequences"):
        if tensors[name].ndim != 1 or tensors[name].dtype != torch.int64 or bool((tensors[name] < 0).any()):
            yield f"{name} is not one row of whole numbers from 0"
    lengths, sequences, number = tensors["lengths"], tensors["sequences"], len(tensors["lengths"])
    if number == 0 or int(lengths.max()) == 0:
        yield "lengths has no response"
    yield from (
        f"lengths has {number} values and {name} {len(tensors[name])}" for name in counts if len(tensors[name]) != number
    )
    for name in counts[:2]:  # before they are added up: a sum may overflow
        if int(tensors[name].max()) > len(sequences):
            yield f"{name} holds more than there are tokens"
    if int(tensors["sequence_lengths"].sum()) != len(sequences):
        yield f"sequences has {len(sequences)} values, and sequence_lengths ask for another number"
    if number * int(lengths.max()) > MOST_CELLS:
        yield f"{number} responses of up to {int(lengths.max())} tokens are too many"
    tokens = (int(lengths.sum()),)
    yield from _number_problems("old_log_probs", tensors, tokens)
    yield from _number_problems("rollout_log_probs", tensors, tokens)
    yield from _number_problems("advantages", tensors, (number, 1) if tensors["advantages"].ndim == 2 else tokens)
    yield from _update_problems(tensors, lengths)


def _update_problems(tensors: dict[str, Tensor], lengths: Tensor) -> Iterator[str]:
    for index in itertools.count():
        name = f"rows/{index}"
        if name not in tensors:
            return
        rows = tensors[name]
        if rows.ndim != 1 or rows.dtype != torch.int64 or not 0 < len(rows) <= len(lengths):
            yield f"{name} is not one row of whole numbers, at most as many as there are responses"
        if int(rows.min()) < 0 or int(rows.max()) >= len(lengths):
            yield f"{name} names a response that is not there"
        yield from _number_problems(f"log_probs/{index}", tensors, (int(lengths[rows].sum()),))


def _number_problems(name: str, tensors: dict[str, Tensor], shape: tuple[int, ...]) -> Iterator[str]:
    tensor = tensors.get(name)
    if tensor is None:
        yield f"{name} is missing"
    elif tensor.dtype != torch.float32 or tuple(tensor.shape) != shape:
        yield f"{name} has {tensor.dtype} values of shape {tuple(tensor.shape)}, not torch.float32 of shape {shape}"
    elif not bool(tensor.isfinite().all()):
        yield f"{name} holds a value that is not finite"
