"""Sampling: the sampler reports what the trainer computes; end tokens, padding and seeds."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast

from rlzoo.learner.batch import collate
from rlzoo.learner.log_probs import ResponseLogProbs
from rlzoo.learner.micro_batches import cut, padded
from rlzoo.rollout.draws import OwnDraws, row_uniforms
from rlzoo.rollout.sampler import HFSampler, encode_prompt
from rlzoo.rollout.types import RolloutGroup
from rlzoo.tasks.problem import Problem
from tests.off_policy import VOCABULARY, make_model, plain_log_probs

END = 1


def tokenizer(pad="<end>"):
    words = {"<pad>": 0, "<end>": END} | {f"w{index}": index for index in range(2, VOCABULARY)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token=pad)


def sampler(pad="<end>", **settings):
    model = make_model()
    settings = {"end_ids": frozenset({END}), "max_new_tokens": 12, **settings}
    return HFSampler(model, tokenizer(pad), **settings)


def tokens(rollouts):
    return [rollout.response_ids for rollout in rollouts]


PROMPTS = ["w5 w6", "w7 w8 w9 w10 w11", "w12"]


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("pad", ["<pad>", "<end>"])
def test_reported_log_probs_equal_those_of_the_model(pad, temperature):
    draw = sampler(pad)
    for rollout in draw.sample(PROMPTS, 4, seed=3, temperature=temperature):
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        with torch.no_grad():
            logits = draw.model(input_ids=sequence[None]).logits[0] / temperature
        expected = logits.log_softmax(-1)[:-1].gather(-1, sequence[1:, None])[:, 0][-len(rollout.response_ids) :]
        torch.testing.assert_close(torch.tensor(rollout.rollout_log_probs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("pad", ["<pad>", "<end>"])
def test_the_first_end_token_is_kept_also_where_it_is_the_padding(pad):
    rollouts = sampler(pad, max_new_tokens=60).sample(PROMPTS, 30, seed=0)
    finished = [rollout for rollout in rollouts if rollout.finished]
    assert 0 < len(finished) < len(rollouts)
    for rollout in rollouts:
        assert rollout.response_ids.count(END) == int(rollout.finished)
        assert (rollout.response_ids[-1] == END) == rollout.finished
        assert len(rollout.rollout_log_probs) == len(rollout.response_ids)
        assert rollout.finished or len(rollout.response_ids) == 60
        assert "<end>" not in rollout.text


def test_a_seed_gives_the_same_responses_and_keeps_the_global_random_state():
    draw = sampler()
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = draw.sample(PROMPTS, 4, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    assert first == draw.sample(PROMPTS, 4, seed=3)
    assert first != draw.sample(PROMPTS, 4, seed=4)


def test_sampling_is_from_the_whole_distribution():
    # first tokens after one prompt: transformers' default of top_k = 50 would omit 47 of the 97
    rollouts = sampler(max_new_tokens=1).sample(PROMPTS[:1], 2000, seed=0, temperature=5.0)
    assert len({rollout.response_ids[0] for rollout in rollouts}) > 90


def test_responses_of_one_prompt_are_adjacent_and_have_the_policy_version():
    rollouts = sampler().sample(PROMPTS, 2, seed=0, policy_version=5)
    assert [rollout.prompt_ids for rollout in rollouts] == [ids for ids in ((5, 6), (7, 8, 9, 10, 11), (12,)) for _ in range(2)]
    assert {rollout.policy_version for rollout in rollouts} == {5}


def test_a_batch_contains_the_rollouts_and_trainer_and_sampler_agree():
    draw = sampler("<pad>")
    rollouts = draw.sample(PROMPTS, 2, seed=1)
    groups = [RolloutGroup(Problem("q", "a"), tuple(rollouts[index : index + 2])) for index in (0, 2, 4)]
    batch = collate(groups)
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.lengths.tolist() == [len(rollout.response_ids) for rollout in rollouts]
    rows = torch.arange(6)
    for side in ("left", "right"):
        with torch.no_grad():
            flat, _ = ResponseLogProbs(draw.model)(padded(batch, rows, 0, side))
        scattered = batch.scatter(rows, flat)
        torch.testing.assert_close(scattered, batch.rollout_log_probs, atol=1e-4, rtol=0)
        for row in range(6):
            expected = plain_log_probs(draw.model, batch.sequences[row], int(batch.lengths[row]))
            torch.testing.assert_close(scattered[row, : len(expected)], expected.detach(), atol=1e-4, rtol=0)


def test_micro_batches_hold_every_row_once_within_the_token_budget():
    rollouts = sampler().sample(PROMPTS, 6, seed=1)
    batch = collate([RolloutGroup(Problem("q", "a"), tuple(rollouts))])
    pieces = cut(batch.sizes, torch.arange(18), 40)
    assert sorted(torch.cat(pieces).tolist()) == list(range(18))
    for piece in pieces:
        longest = max(len(batch.sequences[row]) for row in piece.tolist())
        assert len(piece) == 1 or len(piece) * longest <= 40


def test_padded_micro_batches_hold_the_fewest_tokens():
    def numbers(sizes, max_tokens, **options):
        return [len(piece) for piece in cut(sizes, torch.arange(len(sizes)), max_tokens, **options)]

    # 2 rows of 300 tokens and 18 of 40: together 20 x 300 tokens, split 600 + 720 and the overhead of a second micro-batch
    sizes = [300, 300] + [40] * 18
    assert numbers(sizes, 100_000) == [2, 18]
    assert numbers(sizes, 400) == [1, 1, 10, 8]
    # padding 10 rows of 41 to 50 tokens costs 45 tokens, less than a second micro-batch
    assert numbers(range(50, 40, -1), 100_000) == [10]
    # an overhead of 24 is less than the 25 tokens that a second micro-batch saves
    assert numbers(range(50, 40, -1), 100_000, overhead=24) == [5, 5]
    # brute force over all ways to cut 9 rows
    lengths = [900, 850, 500, 490, 480, 100, 90, 30, 20]

    def cost(sizes, each):
        starts = itertools.accumulate(sizes, initial=0)
        held = [lengths[start] * size for start, size in zip(starts, sizes, strict=False)]
        fits = all(tokens <= 2000 or size == 1 for tokens, size in zip(held, sizes, strict=True))
        return sum(held) + each * len(held) if fits else float("inf")

    ways = [
        [b - a for a, b in itertools.pairwise((0, *cuts, 9))]
        for number in range(9)
        for cuts in itertools.combinations(range(1, 9), number)
    ]
    found = {each: numbers(lengths, 2000, overhead=each) for each in (20, 256, 700)}
    for each, sizes in found.items():
        assert cost(sizes, each) == min(cost(way, each) for way in ways)
    assert len(found[20]) > len(found[256])


def test_chat_template_wraps_the_prompt():
    words = tokenizer()
    words.chat_template = "w90 {{ messages[0]['content'] }} w91"
    assert encode_prompt(words, "w5 w6", chat_template=False) == (5, 6)
    assert encode_prompt(words, "w5 w6", chat_template=True) == (90, 5, 6, 91)


def test_a_row_draws_the_same_tokens_in_any_batch():
    whole = sampler().sample(PROMPTS, 4, seed=3)
    assert tokens(sampler(batch_size=5).sample(PROMPTS, 4, seed=3)) == tokens(whole)
    assert tokens(sampler().sample(PROMPTS[1:], 4, seed=3, first_row=4)) == tokens(whole[4:])


def test_draws_follow_the_probabilities():
    # 40,000 draws from (.5, .3, .2, 0): the standard error of a share is at most .0025
    scores = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().expand(40_000, 4)
    draws = OwnDraws(row_uniforms(0, range(40_000), 1), temperature=1.0)
    shares = draws(torch.zeros(40_000, 1), scores).argmax(-1).bincount(minlength=4) / 40_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2, 0.0]), atol=0.01, rtol=0)
    assert shares[3] == 0


def test_a_sampler_with_weights_of_its_own_keeps_them_until_they_are_replaced():
    trained = make_model()
    own = HFSampler(trained, tokenizer(), end_ids=frozenset({END}), max_new_tokens=12, own_weights=True)
    before = tokens(own.sample(PROMPTS, 4, seed=3))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    assert tokens(own.sample(PROMPTS, 4, seed=3)) == before
    own.update_weights(trained.state_dict().items())
    shared = HFSampler(trained, tokenizer(), end_ids=frozenset({END}), max_new_tokens=12)
    assert tokens(own.sample(PROMPTS, 4, seed=3)) == tokens(shared.sample(PROMPTS, 4, seed=3))
    assert tokens(own.sample(PROMPTS, 4, seed=3)) != before


def test_the_copy_of_a_model_keeps_its_data_type_and_has_no_gradient():
    trained = make_model().bfloat16()
    copied = HFSampler(trained, tokenizer(), end_ids=frozenset({END}), max_new_tokens=12, own_weights=True)
    assert {(each.requires_grad, each.dtype) for each in copied.model.parameters()} == {(False, torch.bfloat16)}
    assert all(each.requires_grad for each in trained.parameters())


def test_the_generation_config_of_a_model_does_not_affect_sampling():
    plain, opinionated = sampler(), sampler()
    shipped = GenerationConfig(do_sample=True, temperature=0.3, top_k=3, top_p=0.5, repetition_penalty=5.0, eos_token_id=7)
    opinionated.model.generation_config = shipped
    assert tokens(plain.sample(PROMPTS, 4, seed=3)) == tokens(opinionated.sample(PROMPTS, 4, seed=3))
    assert opinionated.model.generation_config is shipped


def test_the_text_omits_only_start_end_and_padding_tokens():
    model, special = make_model(), tokenizer("<pad>")
    special.add_special_tokens({"additional_special_tokens": ["w20", "w21"], "bos_token": "w30"})
    read = HFSampler(model, special, end_ids=frozenset({END, 40}), max_new_tokens=12)
    assert special.decode([30, 20, 7, 21, END], skip_special_tokens=True).split() == ["w7"]
    assert read.text([30, 20, 7, 21, END]).split() == ["w20", "w7", "w21"]
    assert read.text([20, 7, 21, 40, 0]).split() == ["w20", "w7", "w21"]
