"""Gives each rule one colour, which is the same in the terminal, in reports and in MLflow's charts."""

from __future__ import annotations

RULE_TAG = "rl_rule"
"""MLflow tag with the rule's name, by which the saved view groups runs."""

PALETTE = (
    *("#a6630c", "#c83243", "#b45091", "#8a63bf", "#434a93", "#137dae", "#04867d", "#308613", "#facb66", "#1f272d"),
    *("#445461", "#5f7281", "#8396a5", "#93320b", "#be501e", "#de7921", "#f2be88", "#115026", "#277c43", "#3ba65e"),
    *("#8ddda8", "#9e102c", "#c82d4c", "#e65b77", "#f792a6", "#0e538b", "#2272b4", "#4299e0", "#8acaff"),
)
"""The colours that MLflow gives to runs."""


def rule_colour(label: str) -> str:
    """Return the colour of a rule, ``#rrggbb``.

    MLflow derives the colour of a group of runs from a checksum of the group's tag and value, and its pages offer no other way
    to set the colour. This function computes the same checksum. Several rules may have the same colour.

    Args:
        label: the rule's name, optionally followed by a space and settings.
    """
    first = second = 0
    for character in f"tag.{RULE_TAG}.{label.partition(' ')[0]}":
        first = (first + ord(character)) % 255
        second = (second + first) % 255
    return PALETTE[(first | second << 8) % len(PALETTE)]
