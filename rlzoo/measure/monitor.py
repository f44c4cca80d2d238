"""Watches the clip over many steps: the profile by length, its figure, and warnings."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlzoo.errors import UserError
from rlzoo.measure.alarms import Alarms
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.response_table import ResponseTable
from rlzoo.policy import ClipPolicy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger("rlzoo")

FILE, SIZES = "monitor.safetensors", "num_responses"

WINDOW = 50  # steps whose responses a profile pools


class Monitor:
    """Keeps the rows of the last `WINDOW` steps."""

    def __init__(self, policy: ClipPolicy) -> None:
        self._name = policy.name
        self._tables: deque[ResponseTable] = deque(maxlen=WINDOW)
        self.alarms = Alarms(policy)

    def after_step(self, step: int, tables: Sequence[ResponseTable], metrics: Mapping[str, float]) -> None:
        """Add one step's rows and metrics; logs a warning if something has been wrong for several steps."""
        if tables:
            self._tables.append(ResponseTable.concat(tables))
        for message in self.alarms.after_step(metrics):
            logger.warning("step %d: %s", step, message)

    def save(self, folder: Path) -> None:
        """Write the remembered rows into a checkpoint's folder."""
        names = [field.name for field in fields(ResponseTable)]
        columns = {name: torch.cat([getattr(table, name) for table in self._tables]) for name in names if self._tables}
        sizes = torch.tensor([len(table.length) for table in self._tables], dtype=torch.long)
        save_file({**columns, SIZES: sizes}, folder / FILE)

    def restore(self, folder: Path, alarms: Mapping[str, Any]) -> None:
        """Restore the rows and alarms of a checkpoint.

        Raises:
            UserError: the file is not what `save` writes.
        """
        try:
            columns = load_file(folder / FILE)
            sizes = columns.pop(SIZES).tolist()
            pieces = {name: column.split(sizes) for name, column in columns.items()}
            tables = [ResponseTable(**{name: piece[n] for name, piece in pieces.items()}) for n in range(len(sizes))]
            self.alarms.restore(alarms)
        except (OSError, ValueError, LookupError, TypeError, RuntimeError, SafetensorError) as error:
            raise UserError(f"--resume: {str(folder / FILE)!r} is not what a run writes: {error}") from error
        self._tables.extend(tables)

    def profile(self) -> LengthProfile | None:
        """The profile of all remembered rows; None if no row has an advantage."""
        return LengthProfile.of(ResponseTable.concat(self._tables)) if self._tables else None

    def figure(self, step: int) -> Figure | None:
        """Plot the clip fraction against length after this step; None if no row has an advantage."""
        found = self.profile()
        if found is None:
            return None
        from rlzoo.measure.figures import Series, profile

        sides = {self._name: found.both, "where A < 0": found.below, "where A > 0": found.above}
        series = {label: Series(found.median_length, side.fraction, side.low, side.high) for label, side in sides.items()}
        return profile(series, title=f"steps {max(1, step - WINDOW + 1)} to {step}")
