"""Shell completion of option values. `rlzoo --install-completion` sets it up."""

from __future__ import annotations


def policies(incomplete: str) -> list[str]:
    """Return the names of rules that complete the last name in a comma-separated list."""
    from rlzoo.core.zoo import load_zoo

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in load_zoo() if name.startswith(last)]


def configs(incomplete: str) -> list[str]:
    """Return the names of shipped configs that complete a name."""
    from rlzoo.config.composition import config_names

    return [name for name in config_names() if name.startswith(incomplete)]
