"""`rlzoo clips list` and `show`: what they print for every policy, and for the policies of a plugin file."""

import io
import json
from importlib.metadata import version

import pytest

from rlzoo import load_zoo
from rlzoo.cli.console import Plain
from rlzoo.cli.fields import print_settings, settings
from tests.cli.conftest import SOUND

PARTS = ("Formula:", "Where:", "Differences from GRPO:", "Reference:")  # after the first sentence of a docstring
OURS = f"rlzoo-llm {version('rlzoo-llm')}"


def test_list_shows_the_name_source_and_summary_of_every_policy(rlzoo):
    code, out, err = rlzoo("clips", "list")
    assert (code, err) == (0, "")
    header, *lines = (line.rstrip() for line in out.splitlines())
    zoo = load_zoo()
    assert header.split() == ["rule", "scope", "advantage", "reduction", "paper"]
    for (name, policy), head, sentence in zip(zoo.items(), lines[::2], lines[1::2], strict=True):
        defaults = policy()
        assert head.split(maxsplit=4) == [name, policy.scope, defaults.advantage, defaults.reduction, policy.paper]
        assert sentence == " " * 6 + policy.__doc__.partition("\n")[0]
        assert sentence.endswith(".")


def test_list_as_json_has_the_same_content(rlzoo):
    rows = {row["name"]: row for row in json.loads(rlzoo("clips", "list", "--json")[1])}
    assert list(rows) == list(load_zoo())
    assert rows["gspo"] == {
        "name": "gspo",
        "what it does": "Clips the geometric mean of a response's token ratios to the same narrow band at every length.",
        "scope": "sequence",
        "advantage": "group_norm",
        "reduction": "sequence_mean",
        "paper": "arXiv 2507.18071",
        "from": OURS,
    }


def test_list_and_show_take_a_plugin_file(rlzoo, plugin):
    file = plugin(SOUND, returned="Plain")
    code, out, _ = rlzoo("clips", "list", "--plugin", file)
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    (place,) = (number for number, line in enumerate(lines) if line.startswith("plain "))
    assert lines[place].split() == ["plain", "token", "group_norm", "sequence_mean", "arXiv", "0000.00000", str(file)]
    assert lines[place + 1] == "      Clips every token to a band; [brackets] stay."
    assert f"  {OURS}" not in out  # policies of rlzoo itself need no address
    assert "\nplain " not in rlzoo("clips", "list")[1]
    (row,) = [row for row in json.loads(rlzoo("clips", "list", "--plugin", file, "--json")[1]) if row["name"] == "plain"]
    assert row["from"] == str(file)
    code, out, _ = rlzoo("clips", "show", "plain", "--plugin", file)
    assert code == 0
    for text in ("Clips every token to a band; [brackets] stay.", "half-width of the band [nats]", "how much [is] clipped"):
        assert text in out
    assert json.loads(rlzoo("clips", "show", "plain", "--plugin", file, "--json")[1])["from"] == str(file)
    assert rlzoo("clips", "show", file)[:2] == (code, out)  # the path alone works, too, as for check
    assert [row["name"] for row in json.loads(rlzoo("clips", "show", file, "--json")[1])] == ["plain"]


def test_a_plugin_that_was_not_given_is_unknown(refused, plugin):
    plugin(SOUND, returned="Plain")
    assert refused("clips", "show", "plain").startswith("unknown rule 'plain'; ")


# clips show


@pytest.mark.long
@pytest.mark.parametrize("folder", ["[red]", "a[/b]"])
def test_brackets_in_a_path_or_a_reference_are_shown_unchanged(rlzoo, plugin, tmp_path, folder):
    (tmp_path / "plugins" / folder).mkdir(parents=True)
    file = plugin(SOUND.replace("arXiv 0000.00000", "note [bold] 7"), returned="Plain", name=f"{folder}/mine.py")
    for command in (("list",), ("show", "plain")):
        code, out, _ = rlzoo("clips", *command, "--plugin", file)
        assert code == 0
        assert str(file) in out
        assert "note [bold] 7" in out
    assert rlzoo("clips", "check", file)[1].startswith("plain  note [bold] 7")


def test_show_has_the_five_parts_the_fields_and_the_metrics(rlzoo):
    code, out, err = rlzoo("clips", "show", "fspo-adaptive")
    assert (code, err) == (0, "")
    lines = [line.rstrip() for line in out.splitlines()]
    policy = load_zoo()["fspo-adaptive"]
    assert lines[0] == f"fspo-adaptive  {OURS}  {policy.paper}"
    assert lines[2].startswith("Clips the importance ratio of a whole response to a learned band that clips the same share of")
    places = [lines.index(title) for title in (*PARTS, "Settings (--set clip.NAME=VALUE)", "Watch these metrics")]
    assert places == sorted(places)
    table = {line.split()[0]: " ".join(line.split()[1:]) for line in lines[places[-2] + 2 : places[-1]] if line}
    assert list(table) == list(policy.model_fields)
    assert table["target_clip_fraction"] == "0.1 > 0, < 0.5 share of responses to clip at every length, for each sign of A"
    assert table["ceiling_factor"] == (
        "3.0 > 0, <= 1000 or null dual clip where A < 0: ceiling as a multiple of the lower width; null for none"
    )
    assert table["lengths"] == (
        "[] list, each >= 1, <= 1e+09 state: response lengths, ascending, at which the offsets are given"
    )
    assert table["reduction"] == (
        '"sequence_mean" token_mean, prompt_mean, sequence_mean, sequence_mean_token_sum, constant_length '
        "how the objective is reduced to a scalar"
    )
    watched = lines[places[-1] + 1 : places[-1] + 1 + len(policy.watch)]
    assert watched == [f"  {metric}: {meaning}" for metric, meaning in policy.watch.items()]


def test_show_as_json_has_the_same_content(rlzoo):
    shown = json.loads(rlzoo("clips", "show", "kl-cov", "--json")[1])
    policy = load_zoo()["kl-cov"]
    assert list(shown) == [
        "name", "what it does", "scope", "advantage", "reduction", "paper", "from", "doc", "settings", "watch", "opted out",
    ]  # fmt: skip
    assert shown["opted out"] == dict(policy.exempt)
    assert shown["watch"] == dict(policy.watch)
    assert all(title in shown["doc"] for title in PARTS)
    fields = {field["name"]: field for field in shown["settings"]}
    assert list(fields) == list(policy.model_fields)
    assert fields["fraction"] == {
        "name": "fraction",
        "default": 2e-3,
        "allowed": "> 0, <= 1",
        "description": "share of the step's tokens to penalise; at least one token",
    }


@pytest.mark.parametrize("columns", [70, 80, 100, 120])
def test_setting_names_are_not_truncated(columns):
    file = io.StringIO()
    console = Plain(file=file, width=columns)
    described = settings(load_zoo()["fspo"])
    print_settings(console, described, "--set clip.NAME=VALUE")
    start = file.getvalue().splitlines()[2].index("meaning")
    meanings = " ".join(line[start:].strip() for line in file.getvalue().splitlines()[3:]).split()
    assert meanings == " ".join(field["description"] for field in described).split()


def test_a_name_in_capital_letters_and_a_rule_in_a_file_get_a_hint(refused, tmp_path):
    assert refused("clips", "show", "FSPO") == "unknown rule 'FSPO'; did you mean 'fspo'?"
    (tmp_path / "here" / "my_rule.py").write_text("")
    for words in (("train", "--clip", "my-rule"), ("clips", "show", "my-rule")):
        assert (
            refused(*words)
            == "unknown rule 'my-rule'; if my_rule.py defines it, add --plugin my_rule.py (in Python: pass the class)"
        )


def test_plugin_output_on_import_does_not_enter_the_json(rlzoo, plugin):
    code, out, err = rlzoo("clips", "list", "--json", "--plugin", plugin("print('hello')\n", SOUND, returned="Plain"))
    assert code == 0
    assert any(rule["name"] == "plain" for rule in json.loads(out))
    assert "hello" in err
