"""`rlzoo train --resume`: the run that goes on, and which of its settings may differ."""

from __future__ import annotations

import logging
from pathlib import Path

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.journal.tracking.record import flatten
from rlzoo.support.redaction import redact_settings

logger = logging.getLogger("rlzoo")


def run_to_resume(output: Path | None) -> tuple[Path]:
    """The configuration a run was started with, as the one file to compose from."""
    if output is None:
        raise UserError("--resume goes on with the run in --output: name its directory")
    if not (output / "config.yaml").is_file():
        raise UserError(f"--resume: {str(output)!r} holds no run: it has no config.yaml")
    return (output / "config.yaml",)


def check_unchanged(before: RunConfig, after: RunConfig) -> None:
    """Refuse settings that would make another run of it."""
    # without secrets, which the configuration in the run directory does not have
    old, new = (flatten(redact_settings(config.model_dump(mode="json"))) for config in (before, after))
    free = () if before.learner.schedule == "constant" else ("steps",)
    allowed = tuple(key for key in ("steps", "output", "launch.", "checkpoint.", "tracking.") if key not in free)
    different = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    changed = [key for key in different if not key.startswith(allowed)]
    for key in different:
        if key not in changed:
            logger.info("--resume: %s was %r and is %r from now on", key, old.get(key), new.get(key))
    if changed:
        key = changed[0]
        raise UserError(
            f"--resume: {key} was {old.get(key)!r} and would be {new.get(key)!r}; a run goes on with the settings it was "
            f"started with, but for {', '.join(name.rstrip('.') for name in allowed)}"
        )
