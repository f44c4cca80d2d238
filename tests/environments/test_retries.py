"""The page's command for several tries at a problem of reasoning-gym."""

from tests.environments.page import train


def test_the_page_trains(tmp_path, model):
    rows = train("Try again", tmp_path, model)
    assert [row["step"] for row in rows[-2:]] == [1, 2]
    assert all(row["response/truncated"] < 1 for row in rows[-2:])  # episodes were played to their end
