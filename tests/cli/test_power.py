"""`rlzoo sweep --power`: what a comparison can detect, before it runs."""

import json


def test_the_command_prints_the_plan_and_trains_nothing(rlzoo, tmp_path):
    words = ("sweep", "--clip", "fspo,gspo", "--seeds", "5", "--output", tmp_path / "out", "--power")
    code, out, _ = rlzoo(*words)
    assert code == 0
    assert "2 rules, 1 pair, 5 seeds each" in out
    assert not (tmp_path / "out").exists()
    _, out, _ = rlzoo(*words, "--json")
    assert json.loads(out)["num_seeds"] == 5
