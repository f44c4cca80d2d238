"""The three kinds of parts that plugins provide, and how the command line finds them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzoo.cli.options import check_rule_names, loading

if TYPE_CHECKING:
    from rlzoo.core.zoo import Entry, Shelf


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of part, handled by one group of commands."""

    command: str  # name of the group of commands
    what: str  # noun for such a part, with its article
    key: str  # the setting that selects a part
    folder: str  # folder with the templates for a new part

    def shelf(self, plugins: list[str] | None = None) -> Shelf[Any]:
        """Return the loaded parts."""
        with loading():
            from rlzoo.core.zoo import load_zoo
        zoo = load_zoo(plugins or [])
        return zoo if self is CLIPS else getattr(zoo, self.command)

    def find(self, name: str, plugins: list[str] | None) -> tuple[Shelf[Any], list[Entry[Any]], bool]:
        """Return the shelf, the parts to which a name, an alias or a path refers, and whether a path was given."""
        shelf = self.shelf(plugins)
        known = shelf.aliases[name][0] if name in shelf.aliases else name
        if known not in shelf and (name.endswith(".py") or os.sep in name or Path(name).is_dir()):
            shelf = self.shelf([name])
            return shelf, shelf.asked_for(), True
        if self is CLIPS and name not in shelf:
            check_rule_names([name])
            from rlzoo.config.composition import refuse_config

            refuse_config(name)
        return shelf, [shelf.entries[shelf[known].name]], False  # shelf[known] raises an error if the part cannot be used


CLIPS = Kind("clips", "a rule", "clip", "policy")
ADVANTAGES = Kind("advantages", "an advantage estimator", "clip.advantage", "advantage")
CORRECTIONS = Kind("corrections", "a mismatch correction", "correction", "correction")
