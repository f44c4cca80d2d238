"""Tracks of `rlzoo race`, which fix the task, data, budget and evaluation so that all rules are tuned and evaluated alike."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from rlzoo.core.errors import UserError, did_you_mean, first_mistake, shown
from rlzoo.core.settings import Settings, user_path
from rlzoo.support.parsing import UnreadableError, parse_yaml
from rlzoo.support.reading import read_text

TRACKS = Path(__file__).parent / "tracks"

Rate = Annotated[float, Field(gt=0, le=1)]
Seeds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=2)]


class Track(Settings):
    """A track as described by its YAML file."""

    name: str
    digest: str  # SHA-256 of the file
    about: str
    config: dict[str, Any]  # settings of a run, except the rule, the learning rate and the seed
    learning_rates: Annotated[tuple[Rate, ...], Field(min_length=3)]  # ascending by a constant factor
    tuning_seeds: Seeds
    seeds: Seeds  # seeds of the reported runs
    clip_fraction: float = Field(gt=0, lt=1)  # target for calibrating widths, with the first tuning seed
    reference: str  # the rule that the others are compared with

    @classmethod
    def read(cls, track: str) -> Track:
        """Read a shipped track by name, or any track by the path of its file; raise `UserError` if there is none."""
        shipped = TRACKS / f"{track}.yaml"
        file = shipped if shipped.is_file() else user_path(track)
        try:
            text = read_text(file)
        except (OSError, ValueError) as error:
            hint = did_you_mean(track, track_names()) or f" (a file, or one of: {', '.join(track_names())})"
            raise UserError(f"no track {shown(track)}{hint}") from error
        try:
            digest = hashlib.sha256(text.encode()).hexdigest()
            return cls.model_validate({**parse_yaml(text), "name": file.stem, "digest": digest})
        except (UnreadableError, TypeError) as error:
            raise UserError(f"track {str(file)!r} is not a mapping in YAML: {error}") from error
        except ValidationError as error:
            raise UserError(f"track {str(file)!r}: {first_mistake(error)}") from error


def track_names() -> list[str]:
    """Return the names of the shipped tracks."""
    return sorted(file.stem for file in TRACKS.glob("*.yaml"))
