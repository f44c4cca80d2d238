"""Assigns each rule a colour for the terminal and MLflow's charts, and for reports unless two colours are similar."""

from __future__ import annotations

import math
from collections.abc import Iterable

RULE_TAG = "rl_rule"
"""MLflow tag with the rule's name, by which the saved view groups runs."""

PALETTE = (
    *("#a6630c", "#c83243", "#b45091", "#8a63bf", "#434a93", "#137dae", "#04867d", "#308613", "#facb66", "#1f272d"),
    *("#445461", "#5f7281", "#8396a5", "#93320b", "#be501e", "#de7921", "#f2be88", "#115026", "#277c43", "#3ba65e"),
    *("#8ddda8", "#9e102c", "#c82d4c", "#e65b77", "#f792a6", "#0e538b", "#2272b4", "#4299e0", "#8acaff"),
)
"""The colours that MLflow assigns to runs."""
ALIKE = 64.0  # distance between colours in RGB space (0 to 255) below which they are hard to tell apart


def rule_colour(label: str) -> str:
    """Return the colour of a rule, ``#rrggbb``.

    MLflow derives the colour of a group of runs from a checksum of the group's tag and value. Its pages offer no other way to
    set the colour. This function computes the same checksum. Several rules may have the same colour.

    Args:
        label: the rule's name, optionally followed by a space and settings.
    """
    first = second = 0
    for character in f"tag.{RULE_TAG}.{label.partition(' ')[0]}":
        first = (first + ord(character)) % 255
        second = (second + first) % 255
    return PALETTE[(first | second << 8) % len(PALETTE)]


def rule_colours(labels: Iterable[str]) -> list[str]:
    """Return the colour of each label. If several rules have similar colours, all but the first get another colour."""
    names, colours = [label.partition(" ")[0] for label in labels], dict[str, str]()
    for name in dict.fromkeys(names):
        used = [bytes.fromhex(colour[1:]) for colour in colours.values()]
        room = {one: min((math.dist(bytes.fromhex(one[1:]), other) for other in used), default=ALIKE) for one in PALETTE}
        choices = (colour for colour in (rule_colour(name), *PALETTE) if room[colour] >= ALIKE)
        colours[name] = next(choices, max(room, key=room.__getitem__))
    return [colours[name] for name in names]
