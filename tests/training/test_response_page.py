"""The page of completions shows what the rule clipped, and where."""

import html.parser
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import rlzoo
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.measure.response_page import EDGES, ShownResponse, Token, render, shade
from rlzoo.training.response_page import PARTIAL, token_texts
from tests.training.short import lines, quick

EVIL = "<script>alert(1)</script>\x1b[2J\u202e&\"'"


class Page(html.parser.HTMLParser):
    """The responses of a page: heading, and the class, the title and the text of each token."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.tokens, self.reading = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "section":
            self.headings.append("")
            self.tokens.append([])
        if tag == "i" and self.headings:
            self.tokens[-1].append([given.get("class", "").split(), given.get("title"), ""])
        self.reading = tag

    def handle_endtag(self, tag):
        self.reading = "h2" if tag == "span" else ""

    def handle_data(self, data):
        if self.headings and self.reading in ("h2", "span"):
            self.headings[-1] += data
        if self.headings and self.reading == "i":
            self.tokens[-1][-1][2] += data


def completion(tokens, **changed):
    clipped = sum(token.clipped for token in tokens)
    given = {"prompt": 1, "response": 2, "question": "1+1", "answer": "2", "hidden": 0, "finished": True, "reward": 1.0}
    given |= {
        "reward_parts": {},
        "advantage": 0.5,
        "judged": 0.3,
        "band": (-0.2, 0.2),
        "ceiling": None,
        "update": 4,
        "clipped": clipped,
        "length": len(tokens),
    }
    return ShownResponse(tokens=tokens, **given | changed)


def test_colours_match_the_values():
    for level, edge in enumerate(EDGES, start=1):
        assert shade(edge) == f"p{level}"
        assert shade(-edge) == f"n{level}"
        assert shade(edge * 0.999) == (f"p{level - 1}" if level > 1 else "")
    assert [shade(value) for value in (0.0, float("nan"), float("inf"), None)] == ["", "", "p5", "o"]
    text = render("t", {}, [])
    for level in range(1, 6):
        assert re.search(rf"\.p{level} {{ background: rgb\(var\(--more\) / ", text)
        assert re.search(rf"\.n{level} {{ background: rgb\(var\(--less\) / ", text)


def test_the_ceiling_of_a_dual_clip_is_next_to_the_band():
    for ceiling, shown in ((None, 0), (0.6, 2)):  # in the table, and above the response
        page = render("t", {}, [completion([Token("a", 0.1)], ceiling=ceiling)])
        assert page.count("-0.200 to 0.200") == 2
        assert page.count("-0.200 to 0.200, ceiling 0.600") == shown


def test_tokens_are_coloured_marked_and_shown_literally():
    tokens = [Token("a\nb", 0.05), Token(" ", -0.4, clipped=True), Token("obs"), Token("<eos>", 0.0, special=True)]
    page = Page(render("t", {}, [completion(tokens, length=3)]))
    assert page.tokens == [
        [[["p3"], "+0.0500", "a↵\nb"], [["n5", "c"], "-0.4000", " "], [["o"], None, "obs"], [["s"], "+0.0000", "<eos>"]]
    ]
    assert page.headings == ["Prompt 1, response 2 clipped: 1 of 3 tokens"]


def test_values_are_drawn_between_the_smallest_and_the_largest_of_the_page():
    values = [0.0, 0.25, 0.5, 1.0]
    text = render("t", {}, [completion([Token("a", 0.0, value=value) for value in values] + [Token("obs")])])
    assert [token[:2] for token in Page(text).tokens[0]] == [
        *([[f"v{level}"], f"+0.0000, value {value:g}"] for level, value in zip((0, 1, 2, 4), values, strict=True)),
        [["o"], None],
    ]
    assert "the critic's value before the token, from 0 " in text
    assert "critic" not in render("t", {}, [completion([Token("a", 0.0)])])


@pytest.mark.parametrize(("marks", "decision"), [([0, 0], "no"), ([1, 0], "1 of 2 tokens"), ([1, 1], "whole response")])
def test_the_decision_is_in_words(marks, decision):
    assert completion([Token("a", 0.0, clipped=bool(mark)) for mark in marks]).decision == decision


def test_given_text_is_escaped_and_only_the_script_of_the_page_may_run():
    text = render(EVIL, {EVIL: EVIL}, [completion([Token(EVIL, 0.1)], question=EVIL, answer=EVIL)])
    assert text.count("<script") == 1
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "default-src 'none'" in text
    assert re.search(r"script-src 'sha256-[\w+/=]{44}'", text)
    assert [address for address in re.findall(r'(?:src|href)="([^"]*)"', text) if not address.startswith("#")] == []


def test_a_page_of_20000_tokens_takes_a_megabyte():
    text = render("t", {}, [completion([Token(" word", 0.0123, clipped=True)] * 2000)] * 10)
    assert len(text) < 1.5e6


@pytest.fixture(scope="module")
def bytewise():
    """A byte-level tokenizer that splits every character beyond ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["ab ab"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.mark.parametrize("text", ["ab ab", "a\n\tb  ", "café", "日本 ab 語", "👩‍👩‍👧 ab", "ab<eos>"])
def test_token_texts_join_to_the_text(bytewise, text):
    ids = bytewise.encode(text)
    found = token_texts(bytewise, ids)
    assert len(found) == len(ids)
    assert "".join(text for text in found if text != PARTIAL) == text


def test_a_character_is_shown_at_the_token_that_completes_it(bytewise):
    assert token_texts(bytewise, bytewise.encode("aé")) == ["a", PARTIAL, "é"]


def test_bytes_that_are_not_valid_text_are_harmless(bytewise):
    first, *rest = bytewise.encode("日")
    for ids in (
        [],
        [first],
        [first, first],
        [*rest, first],
        [rest[0]] * 9 + bytewise.encode("ab"),
        [first, *bytewise.encode("ab")],
    ):
        found = token_texts(bytewise, ids)
        assert len(found) == len(ids)
    assert token_texts(bytewise, [rest[0]] * 9 + bytewise.encode("ab"))[-1] == "ab"


def test_token_texts_keep_the_spaces_of_a_tokenizer_that_strips_them():
    vocabulary = {"<unk>": 0, "▁a": 1, "▁b": 2, "c": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    assert token_texts(PreTrainedTokenizerFast(tokenizer_object=tokenizer), [1, 2, 3, 2]) == ["a", " b", "c", " b"]


@pytest.mark.long
@pytest.mark.parametrize(("clip", "narrow"), [("grpo", "clip.clip_low=1e-4"), ("fspo", "clip.width_low=1e-4")])
def test_a_run_shows_what_its_rule_clipped(tmp_path, clip, narrow):
    overrides = [narrow, narrow.replace("low", "high"), "eval.num_problems=0"]
    result = rlzoo.train(quick(tmp_path / "run", clip=clip, overrides=overrides, steps=1))
    newest = (result.path / "figures" / "completions.html").read_text()
    assert newest == (result.path / "figures" / "completions" / "step-000001.html").read_text()
    page, step = Page(newest), RolloutFile.load(result.path / "rollouts" / "000001.safetensors")
    texts, tokenizer = (
        lines(result.path / "rollouts" / "000001.jsonl"),
        AutoTokenizer.from_pretrained(result.path / "checkpoints" / "step-000001"),
    )
    assert len(page.headings) == 16
    whole = some = 0
    for heading, tokens in zip(page.headings, page.tokens, strict=True):
        prompt, response = map(int, re.match(r"Prompt (\d+), response (\d+) ", heading).groups())
        row = 4 * (prompt - 1) + response - 1
        marked = sum("c" in names for names, _, _ in tokens)
        assert texts[row]["clipped"] == pytest.approx(marked / len(tokens))
        whole += marked == len(tokens)
        some += 0 < marked < len(tokens)
        assert "".join(text for _, _, text in tokens).removesuffix(tokenizer.eos_token) == texts[row]["response"]
        start = int(step.lengths[:row].sum())
        (update,) = (update for update in step.updates if row in update.rows)
        at = update.rows.tolist().index(row)
        before = int(step.lengths[update.rows[:at]].sum())
        expected = update.log_probs[before : before + len(tokens)] - step.old_log_probs[start : start + len(tokens)]
        torch.testing.assert_close(torch.tensor([float(value) for _, value, _ in tokens]), expected, atol=5.1e-5, rtol=0)
        advantage = float(step.advantages[row])
        if clip == "grpo":
            cut = (expected > 1.1e-4) if advantage > 0 else (expected < -1.1e-4)
            sure = ((expected.abs() - 1e-4).abs() > 1e-5) & torch.tensor(advantage != 0)
            assert [("c" in names) for (names, _, _), known in zip(tokens, sure, strict=True) if known] == cut[sure].tolist()
    assert (some > 3) if clip == "grpo" else (whole > 3 and some == 0), "the rule clips tokens, or whole responses"
