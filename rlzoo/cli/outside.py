"""Says whose code runs beside rlzoo's own."""

from __future__ import annotations

import logging

from rlzoo.config.run_config import RunConfig
from rlzoo.zoo import load_zoo

logger = logging.getLogger("rlzoo")


def announce_plugins(config: RunConfig) -> None:
    """A line for every plugin from outside rlzoo that is loaded for this run, with its version and its policies."""
    for source, policies in load_zoo(config.plugins).outside().items():
        logger.info("plugin loaded: %s (%s)", source, ", ".join(policies))
