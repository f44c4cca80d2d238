"""Counts how often the comparisons in a rule are true and false on some inputs."""

from __future__ import annotations

import linecache
import math
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlzoo.core import ops

EXACT = frozenset({"eq", "ne", "isin"})
COMPARISONS = EXACT | {"gt", "ge", "lt", "le", "and", "or", "xor", "any", "all", "logical_and", "logical_or", "logical_xor"}
SKIPPED = (str(Path(torch.__file__).parent), __file__)  # the frames of these files are not part of a rule


@dataclass(slots=True)
class Branch:
    """A comparison in a rule, with the numbers of response tokens (or responses) for which it is true and false."""

    where: str  # file, line and source text
    is_exact: bool  # whether the comparison is with exact or infinite values, which examples may never reach
    true: int = 0
    false: int = 0
    masks: set[bool] = field(default_factory=lambda: {True, False})  # True: always equal to the mask; False: always opposite

    @property
    def reached(self) -> int:
        """The number of times that the comparison had its rarer outcome."""
        return min(self.true, self.false)


class Watched(TorchFunctionMode):
    """Passes the function, the arguments and the result of every torch call to ``note``."""

    def __init__(self, note: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(func, args, kwargs or {}, result)
        return result


def branches(call: Callable[[Any], object], examples: Iterable[Any]) -> list[Branch]:
    """Return the branches that a rule, an estimator or a correction reaches on the examples.

    Of the comparisons inside `ops`, only those of `ops.clamp_by_advantage` are included.
    """
    seen: dict[tuple[object, ...], Branch] = {}
    mask = rows = torch.empty(0)

    def note(func: Any, args: tuple[Any, ...], _: dict[str, Any], result: Any) -> None:
        name = getattr(func, "__name__", "").strip("_")
        if name not in COMPARISONS or result.dtype != torch.bool or result.shape not in (mask.shape, rows.shape):
            return
        stack = (frame for frame, _ in traceback.walk_stack(sys._getframe(2)))
        frames = [frame for frame in stack if not frame.f_code.co_filename.startswith(SKIPPED)]
        outer = next(frame for frame in frames if frame.f_code.co_filename != ops.__file__)
        if frames[0] is not outer and frames[0].f_code is not ops.clamp_by_advantage.__code__:
            return
        place = (outer.f_code, outer.f_lasti, frames[0].f_lasti)
        if place not in seen:
            text = linecache.getline(frames[0].f_code.co_filename, frames[0].f_lineno).strip()
            where = f"{Path(outer.f_code.co_filename).name} line {outer.f_lineno}: {name} in {text!r}"
            seen[place] = Branch(where, name in EXACT or any(map(_is_infinite, args)))
        branch, of_rows = seen[place], mask if result.shape == mask.shape else rows
        values = result[mask] if of_rows is mask else result
        true = int(values.sum())
        branch.true, branch.false = branch.true + true, branch.false + values.numel() - true
        branch.masks &= {side for side in branch.masks if torch.equal(result, of_rows == side)}

    for example in examples:
        mask, rows = example.response_mask, example.response_mask.any(dim=-1, keepdim=True)
        with Watched(note):
            call(example)
    return list(seen.values())


def _is_infinite(value: Any) -> bool:
    return bool(value.isinf().all()) if isinstance(value, Tensor) else isinstance(value, float) and math.isinf(value)
