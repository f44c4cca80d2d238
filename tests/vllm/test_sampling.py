"""What vLLM samples: log-probs, end tokens, seeds, lengths."""

import random

import numpy as np
import pytest
import torch

from rlzoo.core.errors import UserError
from rlzoo.rollout.draws import Truncation

PROMPTS = ["3+5+9=", "1+2=", "+".join("7" * 14) + "="]  # prompts like the embedded model's training data, and much longer ones
END = 1


def tokens(rollouts):
    return [rollout.response_ids for rollout in rollouts]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.7])
def test_log_probs_are_those_of_the_distribution_sampled_from(pair, temperature):
    rollouts = pair.sampler.sample(PROMPTS, 4, seed=3, temperature=temperature)
    assert pair.difference(rollouts, temperature) < 1e-4
    assert pair.difference(rollouts, temperature + 0.1) > 1e-3


def test_the_end_token_is_part_of_the_response_and_the_limit_truncates_it(pair):
    rollouts = pair.sampler.sample(PROMPTS, 30, seed=0, temperature=2.0)
    finished = [rollout for rollout in rollouts if rollout.finished]
    assert 0 < len(finished) < len(rollouts)
    for rollout in rollouts:
        assert rollout.response_ids.count(END) == int(rollout.finished)
        assert (rollout.response_ids[-1] == END) == rollout.finished
        assert len(rollout.rollout_log_probs) == len(rollout.response_ids)
        assert rollout.finished or len(rollout.response_ids) == 24
        assert rollout.text == pair.tokenizer.decode(rollout.response_ids, skip_special_tokens=True)


def test_a_seed_gives_the_same_responses_and_rows_draw_independently(pair):
    whole = pair.sampler.sample(PROMPTS, 8, seed=3, temperature=2.0)
    assert tokens(pair.sampler.sample(PROMPTS, 8, seed=3, temperature=2.0)) == tokens(whole)
    assert tokens(pair.sampler.sample(PROMPTS, 8, seed=4, temperature=2.0)) != tokens(whole)
    assert tokens(pair.sampler.sample(PROMPTS[1:], 8, seed=3, temperature=2.0, first_row=8)) == tokens(whole[8:])
    assert tokens(pair.sampler.sample(PROMPTS[:1], 8, seed=3, temperature=2.0, first_row=8)) != tokens(whole[:8])
    assert len(set(tokens(whole[:8]))) > 2  # eight draws from one prompt


def test_responses_of_one_prompt_are_adjacent_and_have_the_policy_version(pair):
    rollouts = pair.sampler.sample(PROMPTS, 2, seed=0, policy_version=5)
    encoded = [tuple(pair.tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    assert [rollout.prompt_ids for rollout in rollouts] == [ids for ids in encoded for _ in range(2)]
    assert {rollout.policy_version for rollout in rollouts} == {5}


def test_draws_follow_the_whole_distribution(pair):
    # 2,000 first tokens: the standard error of a share is at most .011. With top-k 2, which the small models' generation
    # config asks for, 14 of the 16 tokens would be missing.
    rollouts = pair.sampler.sample(PROMPTS[:1], 2000, seed=0, temperature=2.0)
    shares = torch.tensor([rollout.response_ids[0] for rollout in rollouts]).bincount(minlength=16) / 2000
    with torch.no_grad():
        logits = pair.model(input_ids=torch.tensor([rollouts[0].prompt_ids])).logits[0, -1]
    expected = (logits.float() / 2.0).softmax(-1)
    torch.testing.assert_close(shares, expected, atol=0.05, rtol=0)
    assert expected.sort().values[:-2].sum() > 0.1


def test_global_random_states_and_threads_are_unchanged(pair):
    torch.manual_seed(7)
    before = torch.random.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    pair.sampler.sample(PROMPTS, 4, seed=3)
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


def test_a_prompt_that_leaves_too_little_room_is_refused(pair):
    prompt = "+".join("12345" for _ in range(90)) + "="  # one token a character: 540
    with pytest.raises(UserError, match=r"rollout.max_new_tokens=24: with a prompt of 540 tokens, this exceeds vLLM's"):
        pair.sampler.sample([prompt], 1, seed=0)


def test_more_prompt_tokens_than_vllm_takes_in_one_pass(pair):
    # 60 prompts of 150 to 209 tokens: 10,770 in total, while a pass takes 2,048 or 4,096
    prompts = [f"{index % 10}+" + "7" * (147 + index) + "=" for index in range(60)]
    rollouts = pair.sampler.sample(prompts, 2, seed=1)
    assert sum(len(rollout.prompt_ids) for rollout in rollouts[::2]) == 10_770
    assert pair.difference(rollouts) < 1e-4


@pytest.mark.parametrize("truncation", [Truncation(top_k=4), Truncation(top_p=0.7, top_k=4), Truncation(top_p=1e-6, top_k=3)])
def test_kept_sets_and_log_probs_are_those_of_the_truncated_distribution(pair, truncation):
    rollouts = pair.sampler.sample(PROMPTS, 8, seed=3, temperature=2.0, truncation=truncation)
    agreed = []
    for rollout in rollouts:
        ids, sizes = rollout.kept.ids, rollout.kept.sizes
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        with torch.no_grad():
            logits = pair.model(input_ids=sequence[None]).logits[0, len(rollout.prompt_ids) - 1 : -1].float()
        expected = truncation(logits, 2.0) > -torch.inf
        for place, kept in enumerate(ids.long().split(sizes.tolist())):
            assert 1 <= len(kept) <= truncation.top_k
            log_probs = torch.full_like(logits[place], -torch.inf)
            log_probs[kept] = (logits[place] / 2.0)[kept].log_softmax(-1)
            assert abs(log_probs[rollout.response_ids[place]] - rollout.rollout_log_probs[place]) < 1e-4
            agreed.append(set(kept.tolist()) == set(expected[place].nonzero()[:, 0].tolist()))
        assert len(sizes) == len(rollout.response_ids)
    assert sum(agreed) / len(agreed) > 0.99  # a probability at the edge may be rounded differently
    assert pair.sampler.sample(PROMPTS, 1, seed=3)[0].kept is None
