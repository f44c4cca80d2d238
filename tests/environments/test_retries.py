"""The page's command for several tries at a problem of reasoning-gym."""

from tests.environments.page import train


def test_the_page_trains(tmp_path):
    rows = train("Try again", tmp_path)
    assert [row["env/failed"] for row in rows] == [0, 0]
    assert all(1 <= row["env/tries"] <= 2 for row in rows)
