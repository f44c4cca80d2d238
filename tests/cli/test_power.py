"""`rlzoo sweep --power`: what a comparison can detect, before it runs."""

import json

import pytest


def test_the_command_prints_the_plan_and_trains_nothing(rlzoo, tmp_path):
    words = ("sweep", "--clip", "fspo,gspo", "--seeds", "5", "--output", tmp_path / "out", "--power")
    code, out, _ = rlzoo(*words)
    assert code == 0
    assert "2 rules, 1 pair, 5 seeds each" in out
    assert not (tmp_path / "out").exists()
    _, out, _ = rlzoo(*words, "--json")
    assert json.loads(out)["num_seeds"] == 5


@pytest.mark.long
def test_the_plan_counts_every_value_of_an_axis_and_needs_one_evaluation(rlzoo, refused):
    words = ("sweep", "--clip", "fspo,gspo", "--seeds", "3", "--power")
    _, out, _ = rlzoo(*words, "--grid", "learner.lr=1e-4,2e-4,3e-4")
    assert "6 rules, 15 pairs, 3 seeds each" in out  # 6 x 5 / 2
    assert "the runs differ in their eval settings" in refused(*words, "--grid", "eval.num_problems=100,200")


def test_a_sweep_names_the_differences_between_its_rules_before_it_starts(rlzoo):
    code, out, _ = rlzoo("sweep", "--clip", "grpo,real", "--seeds", "2", "--grid", "learner.lr=1e-4,2e-4", "--dry-run")
    assert code == 0
    names = [f"{clip}-lr={lr}-{seed}" for seed in (0, 1) for clip in ("grpo", "real") for lr in ("1e-4", "2e-4")]
    assert out.splitlines() == [
        *names,
        "the rule is not the only difference: learner.minibatch_by differs between the runs (responses, prompts)",
        "the rules differ in clip.advantage (group_norm, group_mean)",
    ]
