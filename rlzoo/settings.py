"""The base class of all settings: sections of a configuration, rules, estimators, corrections and tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidatorFunctionWrapHandler, field_validator

from rlzoo.support.reading import user_path


class Settings(BaseModel):
    """Settings that are immutable and reject unknown keys, infinite numbers, and booleans in place of numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="wrap")
    @classmethod
    def _rejects_booleans_as_numbers_and_expands_home(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        validated = validate(value)
        if _is_boolean_as_number(value, validated):
            raise ValueError("expected a number, not a boolean")
        return user_path(validated) if isinstance(validated, Path) else validated


def _is_boolean_as_number(value: object, validated: object) -> bool:
    """Whether validation turned a boolean into a number, at any depth of lists and mappings."""
    if isinstance(value, bool):
        return isinstance(validated, int | float) and not isinstance(validated, bool)
    if isinstance(value, Mapping):
        after = validated if isinstance(validated, Mapping) else getattr(validated, "__dict__", {})
        return any(_is_boolean_as_number(inner, after.get(key)) for key, inner in value.items())
    if isinstance(value, list | tuple) and isinstance(validated, list | tuple):
        return any(map(_is_boolean_as_number, value, validated))
    return False


def _expanded(path: str) -> str:
    return str(user_path(path)) if path.startswith("~") else path


NameOrPath = Annotated[str, AfterValidator(_expanded)]
"""A setting that is a path, or a name such as that of a model on the hub; a leading ``~`` is the home folder."""
