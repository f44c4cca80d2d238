"""A rule has the colour that MLflow gives to the group of its runs."""

from rlzoo.core.zoo import load_zoo
from rlzoo.measure.colours import PALETTE, rule_colour, rule_colours


def test_colours_are_those_that_mlflow_shows():
    seen = {"fspo": "#5f7281", "gspo": "#9e102c", "grpo": "#04867d", "rloo": "#137dae"}  # read off its page of runs
    assert {name: rule_colour(name) for name in seen} == seen


def test_settings_after_the_name_do_not_change_the_colour():
    assert rule_colour("fspo clip.width_high=0.005") == rule_colour("fspo")
    assert {rule_colour(name) for name in load_zoo()} <= set(PALETTE)


def test_rules_of_one_figure_have_colours_that_differ():
    assert rule_colour("flat") == rule_colour("gspo")
    flat, gspo, again = rule_colours(["flat", "gspo", "flat width=1"])
    assert flat == again == rule_colour("flat") != gspo
    assert len(set(rule_colours(load_zoo()))) > 20
