"""The sweep over types of models: what agrees, what is refused and confirmed, and what is off."""

import pytest

from examples.lab.models import DEFAULT, PAGE, Row, ask, page
from rlzoo.rollout.sampler import HFSampler

TABLE = "before\n<!-- measured: models -->\nold\n<!-- end -->\nafter\n"


@pytest.mark.long
def test_a_model_agrees_in_every_mode(tmp_path):
    row = ask("llama", tmp_path)
    assert row.answers == {DEFAULT: "agrees", "packing": "agrees", "checkpointing": "agrees"}
    assert row.way == "fused"
    assert len(row.errors) == 7
    assert max(row.errors.values()) < 1e-4


@pytest.mark.long
def test_plain_passes_confirm_a_refusal(tmp_path):
    row = ask("zamba2", tmp_path)  # one of the types with special sizes; its state runs on into the next packed row
    assert row.answers == {DEFAULT: "agrees", "packing": "refused", "checkpointing": "agrees"}
    assert "confirmed" in row.remarks[0]
    assert "NOT" not in row.remarks[0]
    assert row.changes["packing"] > 1
    assert row.changes["later tokens"] < 1e-4


def test_an_encoder_is_refused(tmp_path):
    row = ask("bert", tmp_path)
    assert row.answers == {DEFAULT: "refused"}
    assert "is not causal" in row.remarks[0]
    assert "(confirmed" in row.remarks[0]


@pytest.mark.long
def test_differing_log_probs_are_reported_as_off(tmp_path, monkeypatch):
    draw = HFSampler.draw

    def wrong(self, rows, draws):
        return [drawn._replace(log_probs=[value + 0.01 for value in drawn.log_probs]) for drawn in draw(self, rows, draws)]

    monkeypatch.setattr(HFSampler, "draw", wrong)
    row = ask("gpt2", tmp_path)
    assert row.answers[DEFAULT] == "off"
    assert row.remarks == ["sampler 0.01 nats"]


def test_the_table_replaces_the_one_on_the_page():
    rows = [Row("a", {DEFAULT: "agrees", "packing": "refused"}, "rows", ["packing: x|y"]), Row("b", {DEFAULT: "not built"})]
    text = page(rows, TABLE)
    assert text.startswith("before\n")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "2 types" in text
    assert "1 agrees" in text
    assert "| `a` | rows | agrees | refused |  | packing: x/y |" in text
    assert page(rows, PAGE.read_text()) != PAGE.read_text()
