"""A small model, and a batch whose old log-probs differ from the model's, for tests of the learner."""

import dataclasses

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlzoo import ClipInputs, ops
from rlzoo.learner.batch import ScoredBatch
from rlzoo.testing.data import filled

VOCABULARY, PAD = 97, 0


def make_model(seed=0, vocabulary=VOCABULARY):
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.2,
        pad_token_id=PAD,
        eos_token_id=1,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def plain_log_probs(model, sequence, num_response):
    """Return log-probs of one row's response without our code: no padding, full logits."""
    logits = model(input_ids=sequence[None]).logits[0].float()
    picked = logits.log_softmax(-1)[:-1].gather(-1, sequence[1:, None])[:, 0]
    return picked[-num_response:]


def clip_fraction(policy, inputs):
    clipped = policy(inputs).clipped.float()
    share = clipped if clipped.shape[-1] == 1 else ops.sequence_mean(clipped, inputs.response_mask)
    return float(share[inputs.advantages != 0].mean())


def off_policy_batch(model, policy, num_responses=18, seed=1, *, holes=True):
    """Return ragged rows with old log-probs so far from the model's that 10 to 40% is clipped; every sixth A is 0.

    Rules that never cut get the final spread of the search. Every third row has two turns with three environment tokens between
    them.
    """
    rng = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 30, (num_responses,), generator=rng)
    lengths[0] = 30
    prompts = torch.randint(2, 9, (num_responses,), generator=rng)
    sequences = tuple(
        torch.randint(2, VOCABULARY, (int(prompt + length),), generator=rng)
        for prompt, length in zip(prompts, lengths, strict=True)
    )
    mask = torch.arange(30) < lengths[:, None]
    turns = torch.zeros(mask.shape, dtype=torch.long)
    for row in range(1, num_responses, 3) if holes else ():
        if lengths[row] > 8:
            mask[row, 4:7], turns[row, 7:] = False, 1
    current = torch.zeros(mask.shape)
    with torch.no_grad():
        for row, sequence in enumerate(sequences):
            current[row, : lengths[row]] = plain_log_probs(model, sequence, int(lengths[row]))
    advantages = torch.randn(num_responses, 1, generator=rng)
    advantages[::6] = 0
    noise = torch.randn(mask.shape, generator=rng)
    low, high = 1e-6, 3.0
    for _ in range(60):
        spread = (low * high) ** 0.5
        old = torch.where(mask, current - spread * noise, 0.0)
        fraction = clip_fraction(policy, filled(policy, ClipInputs(current, old, advantages, mask)))
        if 0.2 <= fraction <= 0.3:
            break
        low, high = (spread, high) if fraction < 0.2 else (low, spread)
    if "clipped_means_no_gradient" not in policy.exempt:
        assert 0.1 <= fraction <= 0.4, "the data does not clip"
    return ScoredBatch(
        step=0,
        sequences=sequences,
        prompt_lengths=prompts,
        response_mask=mask,
        turn_ids=torch.where(mask, turns, -1),
        finished=torch.ones(num_responses, dtype=torch.bool),
        seed=0,
        rollout_log_probs=old,
        rewards=advantages[:, 0],
        group_ids=torch.arange(num_responses) // 6,
        advantages=advantages,
        old_log_probs=old,
        old_entropy=-old,
    )


def scored(learner, batch, seed=0):
    """Return the batch with a learner's scores and unchanged advantages."""
    got = learner.score(batch, seed)
    return dataclasses.replace(got, rewards=batch.rewards, advantages=batch.advantages)


def take_updates(learner, batch, seed=0, **settings):
    """Score a batch and run its optimizer steps."""
    return learner.update(scored(learner, batch, seed), **settings)


def take_step(learner, batch, rows=None, seed=0):
    """Run one optimizer step on some rows of a batch, or on all of them."""
    rows = torch.arange(len(batch)) if rows is None else rows
    return learner.apply(learner.accumulate(batch, rows, seed))


def with_token_advantages(batch, seed=2):
    """Return the same rows with a different advantage for every token; rows with A = 0 keep it."""
    mask = batch.response_mask
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    return dataclasses.replace(batch, advantages=torch.where(mask & (batch.advantages != 0), noise, 0.0))


def reordered(batch, order):
    """Return the same rows in another order."""
    values = {
        field.name: getattr(batch, field.name)[order]
        for field in dataclasses.fields(batch)
        if isinstance(getattr(batch, field.name), torch.Tensor)
    }
    sequences = tuple(batch.sequences[row] for row in order.tolist())
    return dataclasses.replace(batch, sequences=sequences, **values)
