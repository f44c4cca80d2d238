"""The three kinds of parts that plugins provide, as the command line names and finds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlzoo.cli.options import check_rule_names, loading, refuse_config

if TYPE_CHECKING:
    from rlzoo.core.zoo import Entry, Shelf


@dataclass(frozen=True, slots=True)
class Kind:
    """What a group of commands is about."""

    command: str  # name of the group
    what: str  # one of its parts, with its article
    key: str  # the setting that selects a part

    def shelf(self, plugins: list[str] | None = None) -> Shelf[Any]:
        """Return the loaded parts."""
        with loading():
            from rlzoo.core.zoo import load_zoo
        zoo = load_zoo(plugins or [])
        return zoo if self.command == "clips" else getattr(zoo, self.command)

    def find(self, name: str, plugins: list[str] | None) -> tuple[Shelf[Any], list[Entry[Any]], bool]:
        """Return the shelf, the parts that a name, an alias or a path stands for, and whether it is a path."""
        from rlzoo.core.zoo import is_path

        shelf = self.shelf(plugins)
        if self.command == "clips":
            check_rule_names([name])
        known = shelf.aliases[name][0] if name in shelf.aliases else name
        looks_like_path = is_path(name, shelf) if self.command == "clips" else name.endswith(".py") or Path(name).is_dir()
        is_misspelled = name.lower() in shelf and not Path(name).exists()  # only in capital letters
        if known not in shelf and looks_like_path and not is_misspelled:
            shelf = self.shelf([name])
            return shelf, shelf.asked_for(), True
        if self.command == "clips" and name not in shelf:
            refuse_config(name)
        return shelf, [shelf.entries[shelf[known].name]], False  # raises an error that says why a part cannot be used


CLIPS = Kind("clips", "a rule", "clip")
ADVANTAGES = Kind("advantages", "an advantage estimator", "clip.advantage")
CORRECTIONS = Kind("corrections", "a mismatch correction", "correction")
