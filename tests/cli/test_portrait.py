"""`rlzoo clips portrait`: a picture and a table."""

import json

import pytest
from matplotlib.figure import Figure


@pytest.mark.long
def test_the_portrait_is_drawn_and_printed(rlzoo, tmp_path):
    picture = tmp_path / "rules.svg"
    code, out, err = rlzoo("clips", "portrait", "grpo", "fspo", "--output", picture)
    assert (code, err) == (0, "")
    assert picture.stat().st_size > 1000
    assert out.rstrip().endswith(f"wrote {picture}")
    lines = [line.split() for line in out.splitlines()]
    assert ["grpo", "1", "+0.182", "-0.223", "-"] in lines
    assert ["4096", "+1.92", "-1.92", "+5.76"] in lines
    _, out, _ = rlzoo("clips", "portrait", "grpo", "--json")
    assert json.loads(out)["grpo"]["weights"]["A > 0"] == {"0.5": 0.5, "0.8": 0.8, "1.0": 1.0, "1.25": 0.0, "2.0": 0.0}


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_only_a_portrait_is_overwritten(rlzoo, refused, tmp_path, suffix):
    picture = tmp_path / f"rules.{suffix}"
    for _ in range(2):
        assert rlzoo("clips", "portrait", "grpo", "--output", picture)[0] == 0
    figure = Figure()
    figure.savefig(picture)
    mine = picture.read_bytes()
    assert refused("clips", "portrait", "grpo", "--output", picture) == (
        f"'{picture}' exists and is not an rlzoo portrait; move it away, or choose another file with --output"
    )
    assert picture.read_bytes() == mine


def test_a_picture_of_another_kind_is_refused(refused):
    assert refused("clips", "portrait", "grpo", "--output", "p.jpg").startswith(
        "--output 'p.jpg': expected a name that ends in .svg"
    )
