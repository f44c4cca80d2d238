"""The how-to page's command for several tries at a reasoning-gym problem."""

import pytest

from tests.tasks.environments.page import check_training, train
from tests.training.short import lines


@pytest.mark.environments
def test_the_page_trains(tmp_path, model):
    path, rows = train("Try again", tmp_path, model)
    check_training(path, rows)
    for step, row in enumerate(rows, 1):
        episodes = lines(path / "rollouts" / f"{step:06}.jsonl")
        assert row["env/tries"] == pytest.approx(sum(len(each["turns"]) for each in episodes) / len(episodes))
        assert row["env/solved"] == pytest.approx(row["reward/mean"])
        assert {turn["observation"] for each in episodes for turn in each["turns"]} == {"That is wrong. Try again.", ""}
