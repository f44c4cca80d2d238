"""The base class of all settings: sections of a configuration, rules, estimators, corrections and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator

from rlzoo.core.errors import UserError, shown


def user_path(path: str | Path) -> Path:
    """Return a path that a user wrote, with ``~`` expanded. Raise `UserError` for ``~NAME`` if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise UserError(f"path {shown(str(path))}: no such user; for a file of this name, write its absolute path") from None


def flatten(settings: Mapping[str, Any], prefix: str = "", section: Any = None) -> dict[str, Any]:
    """Flatten nested settings to dotted keys, as in ``--set``. Given a class ``section``, flatten only its sections."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        inner = getattr(section.model_fields.get(key), "annotation", None) if section else None
        if isinstance(value, Mapping) and (section is None or hasattr(inner, "model_fields")):
            flat |= flatten(value, f"{prefix}{key}.", inner)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


NameOrPath = Annotated[str, AfterValidator(lambda text: str(user_path(text)) if text.startswith("~") else text)]
"""A setting that holds a path or a name, such as the name of a model on the hub."""


class Settings(BaseModel):
    """Immutable settings that reject unknown keys, infinite numbers, and booleans in place of numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _accepts_no_boolean_as_a_number(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        validated = validate(value)
        if _has_boolean_as_number(value, validated):
            raise ValueError("expected a number, not a boolean")
        return user_path(validated) if isinstance(validated, Path) else validated


def _has_boolean_as_number(value: object, validated: object) -> bool:
    """Whether validation turned a boolean into a number, at any depth of lists, mappings and models."""
    if isinstance(value, Mapping):
        fields = validated if isinstance(validated, Mapping) else getattr(validated, "__dict__", {})
        return any(_has_boolean_as_number(inner, fields.get(key)) for key, inner in value.items())
    if isinstance(value, list | tuple) and isinstance(validated, list | tuple):
        return any(map(_has_boolean_as_number, value, validated))
    return isinstance(value, bool) and isinstance(validated, int | float) and not isinstance(validated, bool)
