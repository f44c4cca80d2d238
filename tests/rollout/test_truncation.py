"""Top-p and top-k: which tokens are kept, how they are drawn, and what the sampler reports."""

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from rlzoo.core.errors import RunError
from rlzoo.rollout.draws import OwnDraws, Truncation, row_uniforms
from rlzoo.rollout.episodes import Player
from rlzoo.rollout.kept import KeptSets, by_response
from rlzoo.rollout.sampler import HFSampler
from rlzoo.tasks.environments import Host
from tests.off_policy import VOCABULARY, make_model
from tests.rollout.test_episodes import ENDS, PROBLEMS, WIDE
from tests.rollout.test_sampler import PROMPTS, sampler, tokenizer
from tests.rules import few
from tests.tasks.environments.games import Words

TRUNCATIONS = [Truncation(top_p=0.8), Truncation(top_k=5), Truncation(top_p=0.9, top_k=20), Truncation(top_p=1e-6)]


def sets_of(rollout):
    """Return the kept tokens for each response token, decoded independently; the whole vocabulary without truncation."""
    ids, sizes = rollout.kept.ids.tolist(), rollout.kept.sizes.tolist()
    ends = torch.tensor(sizes).cumsum(0).tolist()
    assert len(sizes) == len(rollout.response_ids)
    return [set(ids[end - size : end]) or set(range(VOCABULARY)) for end, size in zip(ends, sizes, strict=True)]


def warped(logits, temperature, truncation):
    """Return logits after transformers' own warpers, in its order: temperature, top-k, top-p."""
    scores = logits / temperature
    if truncation.top_k is not None:
        scores = TopKLogitsWarper(truncation.top_k)(None, scores)
    return TopPLogitsWarper(truncation.top_p)(None, scores) if truncation.top_p < 1 else scores


def test_the_token_that_crosses_p_is_kept_and_at_least_one_token():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    for top_p, number in ((1e-9, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, 4)):
        assert (Truncation(top_p=top_p)(logits, 1.0) > -torch.inf).tolist() == [[place < number for place in range(4)]]
    # probabilities .5, .3 of top-k 2 become .625, .375
    assert (Truncation(top_p=0.6, top_k=2)(logits, 1.0) > -torch.inf).sum() == 1
    assert (Truncation(top_p=0.6)(logits, 1.0) > -torch.inf).sum() == 2


def test_ties_at_the_edge():
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0]])
    assert (Truncation(top_k=2)(logits, 1.0) > -torch.inf).tolist() == [[True] * 4]
    equal = torch.zeros(1, 4)
    assert (Truncation(top_p=0.6)(equal, 1.0) > -torch.inf).tolist() == [[False, True, True, True]]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
@pytest.mark.parametrize("truncation", [*TRUNCATIONS, Truncation(top_k=1), Truncation(top_p=0.3, top_k=500)], ids=str)
def test_the_kept_tokens_are_those_of_transformers(truncation, temperature):
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 300, generator=generator)
    logits[200:] = logits[200:].round()  # many ties
    expected = warped(logits, temperature, truncation)
    got = truncation(logits, temperature)
    kept, theirs = got > -torch.inf, expected > -torch.inf
    assert torch.equal(got[kept], logits[kept])
    assert torch.equal(kept[:200], theirs[:200])
    # among equal probabilities at the edge of top-p, torch's unstable sort determines which ones transformers keeps
    assert torch.equal(got.sort().values[200:] > -torch.inf, expected.sort().values[200:] > -torch.inf)
    if truncation.top_p == 1:
        assert torch.equal(kept, theirs)


@pytest.mark.long
def test_draws_follow_the_truncated_probabilities():
    # top-p .75 keeps .5 and .3, which become .625 and .375: the standard error of a share of 40,000 is at most .0025
    scores = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().expand(40_000, 4)
    draws = OwnDraws(row_uniforms(0, range(40_000), 1), temperature=1.0, truncation=Truncation(top_p=0.75))
    tokens = draws(torch.zeros(40_000, 1), scores).argmax(-1)
    shares = tokens.bincount(minlength=4) / 40_000
    torch.testing.assert_close(shares, torch.tensor([0.625, 0.375, 0.0, 0.0]), atol=0.01, rtol=0)
    torch.testing.assert_close(draws.log_probs()[:, 0].exp(), torch.tensor([0.625, 0.375])[tokens])
    assert all(sets.ids.tolist() == [0, 1] for sets in draws.kept()[:10])


def test_first_tokens_of_a_large_vocabulary_follow_the_truncated_distribution():
    # more than one block of `draw`
    draw = HFSampler(make_model(vocabulary=600), tokenizer(), end_ids=frozenset({1}), max_new_tokens=1)
    rollouts = draw.sample(PROMPTS[:1], 4000, seed=0, truncation=Truncation(top_p=0.7, top_k=40))
    shares = torch.tensor([rollout.response_ids[0] for rollout in rollouts]).bincount(minlength=600) / 4000
    with torch.no_grad():
        logits = draw.model(input_ids=torch.tensor([rollouts[0].prompt_ids])).logits[:, -1]
    expected = warped(logits, 1.0, Truncation(top_p=0.7, top_k=40)).softmax(-1)[0]
    assert not bool(shares[expected == 0].any())
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0)  # four standard errors


@pytest.mark.parametrize("way", ["graph", "fused", "rows", "generate"])
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_every_sampling_path_reports_truncated_log_probs_and_kept_sets(truncation, way):
    draw = sampler("<pad>", way=way, batch_size=7)
    rollouts = draw.sample(PROMPTS, 4, seed=3, temperature=1.4, truncation=truncation)
    assert {len(rollout.response_ids) for rollout in rollouts} != {12} or truncation.top_p < 0.1  # some end earlier
    for rollout in rollouts:
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        with torch.no_grad():
            logits = draw.model(input_ids=sequence[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
        scores = warped(logits, 1.4, truncation)
        expected = scores.log_softmax(-1).gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.rollout_log_probs), expected, atol=1e-4, rtol=0)
        assert sets_of(rollout) == [set(row.nonzero()[:, 0].tolist()) for row in scores > -torch.inf]


@pytest.mark.parametrize("way", ["graph", "fused", "rows", "generate"])
def test_a_truncation_that_keeps_everything_changes_nothing_and_stores_nothing(way):
    draw = sampler("<pad>", way=way)
    plain = draw.sample(PROMPTS, 4, seed=3)
    whole = draw.sample(PROMPTS, 4, seed=3, truncation=Truncation(top_k=VOCABULARY))
    for ours, theirs in zip(whole, plain, strict=True):
        assert ours.response_ids == theirs.response_ids
        assert ours.rollout_log_probs == theirs.rollout_log_probs
        assert theirs.kept is None
        assert ours.kept == KeptSets.of([], [0] * len(ours.response_ids))
    assert Truncation.of(1.0, None) is None


@pytest.mark.parametrize("way", ["graph", "fused", "rows", "generate"])
def test_episodes_carry_the_kept_sets_of_their_turns(way):
    draw = HFSampler(make_model(), tokenizer("<pad>"), way=way, end_ids=ENDS, max_new_tokens=60)
    truncation = Truncation(top_p=0.8, top_k=30)
    player = Player(draw, Host(Words, workers=0, timeout=5.0), WIDE)
    rollouts = player.play(PROBLEMS, range(12), seed=3, temperature=1.5, truncation=truncation)
    assert {len(rollout.turns) for rollout in rollouts} >= {1, 2}
    for rollout in rollouts:
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        with torch.no_grad():
            logits = draw.model(input_ids=sequence[None]).logits[0, len(rollout.prompt_ids) - 1 : -1]
        scores, kept = warped(logits, 1.5, truncation), sets_of(rollout)
        chosen = [place for start, end in rollout.spans for place in range(start, end)]
        for place, ids in enumerate(kept):
            wanted = scores[place] > -torch.inf if place in chosen else torch.ones(VOCABULARY)
            assert ids == set(wanted.nonzero()[:, 0].tolist())
        expected = scores.log_softmax(-1).gather(-1, torch.tensor(rollout.response_ids)[:, None])[chosen, 0]
        torch.testing.assert_close(torch.tensor(rollout.rollout_log_probs)[chosen], expected, atol=1e-4, rtol=0)


def test_sets_of_different_sizes_are_selected_split_and_sorted_by_response():
    mask = torch.rand(7, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    mask[3] = True
    sets = KeptSets.of_mask(mask)
    assert sets.sizes[3] == 0
    assert torch.equal(sets.mask(9), mask)
    index = torch.tensor([6, 3, 0, 0])
    assert torch.equal(sets.select(index).mask(9), mask[index])
    assert torch.equal(torch.cat([part.mask(9) for part in sets.split(3)]), mask)
    assert sets.first(2).ids.untyped_storage().nbytes() == 4 * int(sets.sizes[:2].sum()), "a view would pickle the whole batch"
    columns = [
        (torch.tensor(rows), KeptSets.of_mask(mask[[4 * len(rows) % 7 + row for row in rows]]))
        for rows in ([0, 2], [2, 0], [2])
    ]
    assert [len(sets) for sets in by_response(columns, 3)] == [2, 0, 3]
    assert torch.equal(by_response(columns, 3)[2].mask(9), mask[[3, 3, 6]])


@pytest.mark.parametrize("way", ["fused", "rows", "generate"])
@pytest.mark.parametrize("truncation", [None, Truncation(top_k=94), Truncation(top_p=0.9)], ids=str)
def test_tokens_with_a_logit_of_minus_infinity_are_never_drawn(way, truncation):
    draw, banned = sampler(way=way), list(range(40, 60))
    draw.model.lm_head.register_forward_hook(
        lambda head, states, logits: logits.index_fill(-1, torch.tensor(banned), -torch.inf)
    )
    rollouts = draw.sample(PROMPTS, 8, seed=3, temperature=2.0, truncation=truncation)
    assert not {token for rollout in rollouts for token in rollout.response_ids} & set(banned)
    assert torch.tensor([value for rollout in rollouts for value in rollout.rollout_log_probs]).isfinite().all()
    if truncation is not None:
        assert not any(kept & set(banned) for rollout in rollouts for kept in sets_of(rollout))


@pytest.mark.parametrize("way", ["fused", "rows", "generate"])
@pytest.mark.parametrize("truncation", [None, Truncation(top_p=0.9, top_k=20)], ids=str)
@pytest.mark.parametrize("value", few([float("nan"), float("inf"), None]))
def test_logits_that_are_not_finite_end_the_sampling(way, truncation, value):
    draw = sampler(way=way)

    def spoil(head, states, logits):
        return torch.full_like(logits, -torch.inf) if value is None else logits.index_fill(-1, torch.tensor([6]), value)

    draw.model.lm_head.register_forward_hook(spoil)
    with pytest.raises(RunError, match="the model's logits are not finite for 12 of 12 tokens; check its weights"):
        draw.sample(PROMPTS, 2, seed=3, truncation=truncation)
    with pytest.raises(RunError, match="the model's logits are not finite"):
        Player(draw, Host(Words, workers=0, timeout=5.0), WIDE).play(PROBLEMS[:1], [0], seed=3, truncation=truncation)
