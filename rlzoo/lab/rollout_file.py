"""One step's recorded tensors, read from their file and held to what a run writes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rlzoo.errors import UserError

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
        tensors = load_file(file)
    except (OSError, ValueError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:  # its own differ by what is torn
        raise UserError(f"{str(file)!r} cannot be read: {error}; remove it to go without this step") from error
    problem = _problem(tensors)
    if problem is not None:
        raise UserError(f"{str(file)!r} does not hold what a run records: {problem}; remove it to go without this step")
    return tensors


def _problem(tensors: dict[str, Tensor]) -> str | None:
    """What is wrong, such as ``"lengths has 11 values and group_ids 12"``; None if nothing is."""
    if "rows/0" not in tensors:
        return None  # nothing was learned in this step, so nothing of it is read
    counts = ("lengths", "sequence_lengths", "group_ids")
    values = ("sequences", "old_log_probs", "rollout_log_probs", "advantages")
    missing = [name for name in (*counts, *values) if name not in tensors]
    if missing:
        return f"{missing[0]} is missing"
    for name in (*counts, "sequences"):
        if tensors[name].ndim != 1 or tensors[name].dtype != torch.int64 or bool((tensors[name] < 0).any()):
            return f"{name} is not one row of whole numbers from 0"
    lengths, number = tensors["lengths"], len(tensors["lengths"])
    if number == 0 or int(lengths.max()) == 0:
        return "lengths has no response"
    for name in counts[1:]:
        if len(tensors[name]) != number:
            return f"lengths has {number} values and {name} {len(tensors[name])}"
    if int(tensors["sequence_lengths"].max()) > len(tensors["sequences"]) or int(lengths.max()) > len(tensors["sequences"]):
        return "a length is more than there are tokens"  # before they are added up: the sum may overflow
    if int(tensors["sequence_lengths"].sum()) != len(tensors["sequences"]):
        return f"sequences has {len(tensors['sequences'])} values, and sequence_lengths ask for another number"
    if number * int(lengths.max()) > MOST_CELLS:
        return f"{number} responses of up to {int(lengths.max())} tokens are too many"
    return _values_problem(tensors, lengths)


def _values_problem(tensors: dict[str, Tensor], lengths: Tensor) -> str | None:
    """The same of what there is for each token, and of the updates."""
    number, tokens = len(lengths), int(lengths.sum())
    advantages = tensors["advantages"]
    wanted = (number, 1) if advantages.ndim == 2 else (tokens,)
    for name, shape in (("old_log_probs", (tokens,)), ("rollout_log_probs", (tokens,)), ("advantages", wanted)):
        if problem := _numbers_problem(name, tensors[name], shape):
            return problem
    index = 0
    while (rows := tensors.get(f"rows/{index}")) is not None:
        if rows.ndim != 1 or rows.dtype != torch.int64 or len(rows) == 0:
            return f"rows/{index} is not one row of whole numbers"
        if int(rows.min()) < 0 or int(rows.max()) >= number:
            return f"rows/{index} names a response that is not there"
        if len(rows) > number:
            return f"rows/{index} has {len(rows)} values for {number} responses"
        if f"log_probs/{index}" not in tensors:
            return f"log_probs/{index} is missing"
        shape = (int(lengths[rows].sum()),)
        if problem := _numbers_problem(f"log_probs/{index}", tensors[f"log_probs/{index}"], shape):
            return problem
        index += 1
    return None


def _numbers_problem(name: str, tensor: Tensor, shape: tuple[int, ...]) -> str | None:
    if tensor.dtype != torch.float32:
        return f"{name} is {str(tensor.dtype).removeprefix('torch.')}, not float32"
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}, not {shape}"
    return None if bool(tensor.isfinite().all()) else f"{name} holds a value that is not finite"
