"""`rlzoo clips check`: every law by name, and the smallest input that shows a failure."""

import json
import re
import time

import pytest

from rlzoo import load_zoo, testing
from tests.cli.conftest import REVERSED, SOUND

LAWS = [law.name for law in testing.LAWS]


def laws_of(out):
    """Return the outcome of every law in a printed check."""
    lines = [line.split(maxsplit=2) for line in out.splitlines()]
    return {line[1]: line[2].rstrip() for line in lines if len(line) == 3 and line[1] in LAWS}


def test_check_names_every_law_and_passes(rlzoo):
    started = time.process_time()
    code, out, err = rlzoo("clips", "check", "gspo")
    assert time.process_time() - started < 15  # seconds of CPU time
    assert (code, err) == (0, "")
    assert out.startswith("gspo  arXiv 2507.18071")
    assert laws_of(out) == dict.fromkeys(LAWS, "pass")
    assert f"{len(LAWS)} kept, 0 broken, 0 opted out" in out


@pytest.mark.long
def test_check_prints_the_portrait_beside_that_of_grpo(rlzoo):
    out = rlzoo("clips", "check", "fspo")[1].rpartition(" kept, ")[2]
    lines = [line.split() for line in out.splitlines()]
    assert ["fspo", "1", "+0.03", "-", "-0.03", "+0.09"] in lines
    assert ["grpo", "1", "+0.182", "-", "-0.223", "-"] in lines
    assert ["grpo", "A>0", "0.5", "0.8", "1", "0", "0"] in lines


@pytest.mark.long
def test_check_reports_laws_that_are_opted_out_of_and_why(rlzoo):
    exempt = load_zoo()["kl-cov"].exempt
    code, out, _ = rlzoo("clips", "check", "kl-cov")
    assert code == 0
    expected = {law: f"opted out  {exempt[law]}" if law in exempt else "pass" for law in LAWS}
    assert laws_of(out) == expected
    assert f"{len(LAWS) - len(exempt)} kept, 0 broken, {len(exempt)} opted out" in out


def test_check_of_a_broken_policy_shows_law_statement_and_smallest_input(rlzoo, plugin):
    file = plugin(SOUND, REVERSED, returned="Reversed")
    code, out, err = rlzoo("clips", "check", file)
    assert (code, err) == (1, "")
    outcomes = laws_of(out)
    assert outcomes.pop("ratio_one_is_reinforce") == "fail  the gradient is not in the direction of the advantage"
    assert outcomes.pop("gradients_follow_the_advantage").startswith("fail  the gradient is reversed")
    assert set(outcomes.values()) == {"pass"}
    lines = [line.rstrip() for line in out.splitlines()]
    place = lines.index(
        "ratio_one_is_reinforce: At ratio 1, nothing is clipped, and each row's gradient is A times a positive constant."
    )
    assert lines[place + 1] == "fails on"
    # one response of one token, its advantage rounded to a whole number
    assert lines[place + 2] in ("  A = -1: log-ratios +0", "  A = +1: log-ratios +0")
    assert f"{len(LAWS) - 2} kept, 2 broken, 0 opted out" in lines
    reach = next(line for line in lines if "branches" in line)
    assert re.fullmatch(r"\d+ branches, each reached [1-9]\d* times or more", reach)


def test_one_mistake_that_breaks_many_laws_is_described_once(rlzoo, plugin):
    file = plugin(SOUND.replace("return ops.", "return ops.log_ratio(inputs)  # "), "", returned="Plain")
    out = " ".join(rlzoo("clips", "check", file)[1].split())
    assert out.count("the result is a Tensor, not a ClipResult") == out.count("fails on") == 1


def test_check_as_json_has_the_same_content(rlzoo, plugin):
    file = plugin(SOUND, REVERSED, returned="Plain, Reversed")
    code, out, _ = rlzoo("clips", "check", file, "--json")
    assert code == 1
    plain, reversed_ = json.loads(out)
    assert (plain["name"], reversed_["name"]) == ("plain", "reversed")
    for report in (plain, reversed_):
        assert [law["law"] for law in report["laws"]] == LAWS
        assert report["reached"] > 0
        assert all(list(law) == ["law", "status", "detail", "inputs"] for law in report["laws"])
    assert {law["status"] for law in plain["laws"]} == {"pass"}
    failed, _ = [law for law in reversed_["laws"] if law["status"] == "fail"]
    assert failed["law"] == "ratio_one_is_reinforce"
    assert failed["detail"] == "the gradient is not in the direction of the advantage"
    assert re.fullmatch(r"  A = \S+: log-ratios \+0", failed["inputs"])  # one response suffices to show it


def test_a_policy_that_raises_fails_the_law_with_its_exception(rlzoo, plugin):
    raising = SOUND.replace("log_ratio = ops.log_ratio(inputs)", "raise ValueError('no such [tensor]')")
    code, out, err = rlzoo("clips", "check", plugin(raising, returned="Plain"))
    assert (code, err) == (1, "")
    assert laws_of(out)["is_pure"] == "fail  ValueError: no such [tensor] (mine.py line 16)"
    assert laws_of(out)["settings_are_complete"] == "pass"  # it does not call the policy


def test_check_refuses_an_unknown_policy(refused, plugin, tmp_path):
    assert refused("clips", "check", "gsop").endswith("; did you mean 'gspo'?")
    missing = tmp_path / "none.py"
    assert refused("clips", "check", missing).startswith(f"plugin '{missing}' does not exist; specify a .py file")
    file = plugin(SOUND, "import no_such_library\n", returned="Plain")
    assert refused("clips", "check", file) == (
        f"plugin '{file}' cannot be imported: ModuleNotFoundError: No module named 'no_such_library'"
    )
