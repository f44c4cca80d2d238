"""`rlzoo clips portrait`: tables."""


def test_the_portrait_is_printed(rlzoo):
    code, out, err = rlzoo("clips", "portrait", "grpo", "fspo")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert ["grpo", "1", "+0.182", "-", "-0.223", "-"] in lines
    assert ["4096", "+1.92", "-", "-1.92", "+5.76"] in lines
