"""Episodes of several turns: vLLM plays the same ones as transformers, and computes each token once."""

import contextlib

import pytest
import torch

from examples.write_served import write_served
from rlzoo import RunConfig
from rlzoo.config.engines import engine_of
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from rlzoo.rollout.episodes import Limits, Player
from rlzoo.rollout.sampler import Draws
from tests.vllm.conftest import Pair, serving

GREEDY = 0.01  # the lowest temperature that vLLM accepts
BLOCK = 128  # tokens in a block of vLLM's cache on the CPU; a block is found once it is fully computed


def settings(*overrides):
    return RunConfig.compose(["guess"], clip="grpo", overrides=["eval.num_problems=0", *overrides])


def sampler_of(config, model, tokenizer):
    return engine_of(config.rollout).make(model, tokenizer, eos_token_ids(model, tokenizer), named=config.model)


@pytest.fixture(scope="module", params=["process", "server"])
def pair(request, tmp_path_factory):
    """The model that plays, and vLLM; it is stopped before the next engine starts."""
    folder = tmp_path_factory.mktemp(request.param)
    with contextlib.ExitStack() as stack:
        overrides = ["rollout.engine=vllm"]
        if request.param == "server":
            write_served("embedded-guess", folder / "model")
            address = stack.enter_context(serving(folder / "model", "embedded-guess", folder / "server.log"))
            overrides += [f"rollout.vllm.server={address}"]
        model, tokenizer = load_pretrained("embedded-guess")
        made = Pair(model, tokenizer, sampler_of(settings(*overrides), model, tokenizer))
        made.sync()
        yield made
        made.sampler.close()


def play(sampler, *overrides, temperature=1.0, context=None, games=16):
    """Play two episodes of each game."""
    config = settings(*overrides)
    problems = [problem for problem in config.task.train_problems(0, games) for _ in range(2)]
    seeds = [config.task.episode_seed(problem) for problem in problems]
    limits = Limits.of(config.rollout, context or sampler.context)
    return Player(sampler, config.task.host, limits).play(problems, seeds, seed=5, temperature=temperature)


def plain(pair, rollout, temperature=1.0):
    """Return log-probs of the whole vocabulary at each token of a response, without our code."""
    sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
    with torch.no_grad():
        logits = pair.model(input_ids=sequence[None]).logits[0].double() / temperature
    return logits.log_softmax(-1)[len(rollout.prompt_ids) - 1 : -1]


def chosen(rollout):
    mask = torch.zeros(len(rollout.response_ids), dtype=torch.bool)
    for start, end in rollout.spans:
        mask[start:end] = True
    return mask


@pytest.fixture
def decided(pair):
    """The pair with logits multiplied by 1,024: at the lowest temperature, 1e-4 between two tokens becomes 10 nats."""
    # the sampler is compared with the model before rounding shows in its logits
    pair.transformers = sampler_of(settings(), pair.model, pair.tokenizer)
    norm = pair.model.model.norm.weight
    norm.data *= 1024
    pair.sync()
    yield pair
    norm.data /= 1024
    pair.sync()


def test_greedy_episodes_equal_those_of_transformers(decided):
    theirs = play(decided.transformers, temperature=GREEDY)
    ours = play(decided.sampler, temperature=GREEDY)
    assert max(len(rollout.turns) for rollout in ours) > 6
    for got, expected in zip(ours, theirs, strict=True):
        assert got.prompt_ids == expected.prompt_ids
        assert got.response_ids == expected.response_ids
        assert got.turns == expected.turns  # texts, places, answers and rewards
        assert (got.finished, got.reward) == (expected.finished, expected.reward)
        best = plain(decided, got).argmax(dim=-1)
        assert torch.equal(best[chosen(got)], torch.tensor(got.response_ids)[chosen(got)])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_turns_equal_those_of_one_pass_over_the_episode(pair, temperature):
    rollouts = play(pair.sampler, temperature=temperature)
    assert len({rollout.response_ids for rollout in rollouts}) > 20
    for rollout in rollouts:
        expected = plain(pair, rollout, temperature).gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        reported, own = torch.tensor(rollout.rollout_log_probs).double(), chosen(rollout)
        torch.testing.assert_close(reported[own], expected[own], atol=1e-4, rtol=0)
        assert (reported[~own] == 0).all()


def test_a_turn_reuses_the_cache_of_earlier_turns(pair):
    pair.sync()  # this empties the cache
    rng = torch.Generator().manual_seed(0)
    contexts = {row: tuple(torch.randint(2, 42, (100 + 20 * row,), generator=rng).tolist()) for row in range(4)}
    found, computed = [], dict.fromkeys(contexts, 1)
    for turn in range(3):
        with pair.cached() as hits:
            drawn, _ = pair.sampler.draw_turn(contexts, Draws(seed=1, rows=range(4), limit=24, turn=turn))
        assert hits == [sum((size - 1) // BLOCK * BLOCK for size in computed.values())]
        found += hits
        contexts = {row: ids + tuple(tokens) for (row, ids), (tokens, *_) in zip(contexts.items(), drawn, strict=True)}
        computed = {row: len(ids) for row, ids in contexts.items()}  # except for the last token
        observed = torch.randint(2, 42, (130,), generator=rng).tolist()
        contexts = {row: (*ids, *observed) for row, ids in contexts.items()}
    pair.sampler.rest()
    assert found[0] == 0 < found[1] < found[2]


def test_a_turn_ends_at_its_end_token_or_at_its_limit_and_then_the_episode_is_over(pair):
    rollouts = play(pair.sampler, "rollout.max_turn_tokens=7", temperature=1.5)
    ends = pair.sampler.end_ids
    cut = [rollout for rollout in rollouts if rollout.response_ids[-1] not in ends]
    assert 0 < len(cut) < len(rollouts)
    for rollout in rollouts:
        *before, (start, end) = rollout.spans
        assert all(rollout.response_ids[place - 1] in ends for _, place in before)
        assert all(token not in ends for first, place in rollout.spans for token in rollout.response_ids[first : place - 1])
        if rollout in cut:
            assert (end - start, rollout.finished) == (7, False)


def test_an_episode_does_not_depend_on_the_rest_of_its_batch(pair):
    whole = play(pair.sampler, games=6)
    again = play(pair.sampler, games=3)
    assert [rollout.response_ids for rollout in again] == [rollout.response_ids for rollout in whole[:6]]


def test_an_episode_ends_at_the_context_limit_of_vllm(pair):
    pair.sampler.max_model_len, given = 90, pair.sampler.max_model_len
    try:
        assert pair.sampler.context == 90
        rollouts = play(pair.sampler, "rollout.max_new_tokens=80")
    finally:
        pair.sampler.max_model_len = given
    assert pair.sampler.context == 512
    sizes = [len(rollout.prompt_ids + rollout.response_ids) for rollout in rollouts]
    assert max(sizes) <= 90
    unfinished = [rollout for rollout in rollouts if not rollout.finished]
    assert len(unfinished) > 4
    assert not any(rollout.failure for rollout in rollouts)


@pytest.mark.parametrize("pair", ["process"], indirect=True)  # a server never sleeps
def test_vllm_sleeps_after_the_episodes_and_not_between_their_turns(pair, monkeypatch):
    calls = []
    monkeypatch.setattr(pair.sampler, "sleeps", True)  # a CPU has no sleep mode, so the calls of vLLM are recorded
    monkeypatch.setattr(pair.sampler.llm, "sleep", lambda level: calls.append("sleep"), raising=False)
    monkeypatch.setattr(pair.sampler.llm, "wake_up", lambda: calls.append("wake up"), raising=False)
    generate = pair.sampler.llm.generate
    monkeypatch.setattr(pair.sampler.llm, "generate", lambda *given, **named: calls.append("draw") or generate(*given, **named))
    turns = max(len(rollout.turns) for rollout in play(pair.sampler, temperature=GREEDY))
    assert turns > 6
    assert calls == ["draw"] * turns + ["sleep"]
    calls.clear()
    pair.sampler.sample(["guess 0-9: "], 1, seed=0)
    assert calls == ["wake up", "draw", "sleep"]
    pair.sampler.asleep = False
