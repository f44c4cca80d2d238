"""Chooses the number of threads that torch computes with on a CPU, by the size of the work.

Threads that share an operation wait for each other at its end, and spin while they wait. Where operations are small, that
takes as long as the second thread saves; where other processes need the cores, each wait lasts until the scheduler returns
to the thread that is missing, and the run takes several times as long.

The choice depends on the model and the batch alone, never on the load: sums that are cut differently differ in their last
bits, and a resumed run computes the same bits as one that was not stopped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEARNING = 2**25
"""Multiplications of a layer's square product in a micro-batch, tokens x width squared, for which several threads pay."""

SAMPLING = 2**23
"""The same for a token of every response. There is no backward pass, and the operations are fewer and larger."""

FEWEST_ROWS = 32
"""Rows whose product takes as long as that of fewer rows: reading the weights takes that time."""

SET_BY_USERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


class Threads:
    """One thread for work that is too small to share, all of torch's threads for other work.

    Example:
        ``with Threads(model).sampling(rows=64): ...``
    """

    def __init__(self, model: PreTrainedModel, *, is_on: bool = True) -> None:
        """Prepare the choice for a model.

        Args:
            model: its width decides how large the operations are.
            is_on: False leaves torch's setting as it is, as when two threads of this process compute at the same time.
        """
        self._width = int(model.config.get_text_config().hidden_size)
        is_left = any(os.environ.get(name) for name in SET_BY_USERS)
        self._is_on = is_on and not is_left and model.device.type == "cpu"

    @contextmanager
    def sampling(self, rows: int) -> Iterator[None]:
        """Choose for the block, in which so many responses are sampled at once."""
        with self._computing(max(rows, FEWEST_ROWS) * self._width**2 < SAMPLING):
            yield

    @contextmanager
    def learning(self, tokens: float) -> Iterator[None]:
        """Choose for the block, in which micro-batches have about so many tokens."""
        with self._computing(tokens * self._width**2 < LEARNING):
            yield

    @contextmanager
    def _computing(self, is_small: bool) -> Iterator[None]:
        former = torch.get_num_threads()
        if not (self._is_on and is_small) or former == 1:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(former)
