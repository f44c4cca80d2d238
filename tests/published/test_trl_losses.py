"""rlzoo's rules compared with the losses of TRL 1.16: values and gradients of its `_compute_loss` on shared tensors."""

import dataclasses
import math

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from rlzoo import ClipInputs, load_zoo
from rlzoo.core.reductions import StepCounts, kl_estimate, reduce_objective
from rlzoo.models.pretrained import load_pretrained
from tests.published.shared import MAX_LENGTH, assert_agree, clipped_share, ours, shared_inputs

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # transformers' own deprecations
TRAINERS = {"gmpo": (GMPOConfig, GMPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}
SEQUENCE = {"importance_sampling_level": "sequence"}

CASES = [
    ("grpo", {}, {"loss_type": "grpo", "epsilon": 0.2}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.28}, {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.28}),
    ("grpo", {"dual_clip": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
    ("grpo", {"reduction": "constant_length"}, {"loss_type": "dr_grpo"}),
    ("grpo", {"reduction": "token_mean", "clip_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("grpo", {"reduction": "token_mean"}, {"loss_type": "bnpo"}),
    ("gspo", {}, {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, **SEQUENCE}),
    ("gspo", {"dual_clip": 1.0005}, {"loss_type": "grpo", "epsilon": 3e-4, "epsilon_high": 4e-4, "delta": 1.0005, **SEQUENCE}),
    ("gspo-token", {"reduction": "token_mean"}, {"loss_type": "dapo", "epsilon": 3e-4, "epsilon_high": 4e-4, **SEQUENCE}),
    ("gspo-token", {"clip_low": 2e-3, "clip_high": 2.5e-3, "reduction": "sequence_mean_token_sum"},
     {"loss_type": "luspo", "epsilon": 2e-3, "epsilon_high": 2.5e-3, **SEQUENCE}),
    ("cispo", {"clip_high": 0.25}, {"loss_type": "cispo", "epsilon_high": 1.25}),
    ("sapo", {}, {"loss_type": "sapo"}),
    ("sapo", {"tau_positive": 2.0, "tau_negative": 3.0},
     {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}),
    ("vespo", {}, {"loss_type": "vespo"}),
    ("vespo", {"k_positive": 1.0, "lambda_positive": 0.5, "k_negative": 2.0, "lambda_negative": 4.0},
     {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 4.0}),
    ("opsm", {"delta": 0.02}, {"loss_type": "grpo", "off_policy_mask_threshold": 0.02}),
    ("rloo", {}, {"epsilon": 0.2}),
    ("rloo", {"clip_low": 0.1, "clip_high": 0.3}, {"epsilon": 0.1, "epsilon_high": 0.3}),
    ("gmpo", {}, {"epsilon": 0.4, "epsilon_high": 0.4}),
    ("gmpo", {"width_low": 0.1, "width_high": 0.2}, {"epsilon": 0.1, "epsilon_high": 0.2}),
]  # fmt: skip


def rule(name, settings):
    return load_zoo()[name](**settings)


def trainer_of(folder, name="grpo", **settings):
    """Return TRL's own trainer, made by its constructor."""
    model, tokenizer = load_pretrained("embedded")
    config, kind = TRAINERS.get(name, (GRPOConfig, GRPOTrainer))
    settings = {"steps_per_generation": settings.get("gradient_accumulation_steps", 1), **settings}
    args = config(
        output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False,
        max_completion_length=MAX_LENGTH, per_device_train_batch_size=24, num_generations=8, **settings,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["1+1="]})
    trainer = kind(model=model, args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions),
                   processing_class=tokenizer, train_dataset=prompts)  # fmt: skip
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # as in the training loop
    return trainer


def theirs(trainer, inputs, num_items=None, dtype=torch.float64):
    """Return TRL's loss and gradient; only its forward pass is replaced, by our log-probs and entropies."""
    log_probs = inputs.log_probs.to(dtype).detach().clone().requires_grad_()
    mask = inputs.response_mask
    entropy = torch.zeros_like(log_probs) if inputs.old_entropy is None else inputs.old_entropy.to(dtype)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (log_probs, entropy, None)
    trainer.model.train()
    ids = torch.zeros(mask.shape, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask.long(),
        "advantages": inputs.advantages[:, 0].to(dtype), "old_per_token_logps": inputs.old_log_probs.to(dtype),
        # for RLOO, whose ratio is per response
        "old_logps": torch.where(mask, inputs.old_log_probs.to(dtype), 0.0).sum(1),
        "num_items_in_batch": mask.sum() if num_items is None else torch.tensor(num_items),
    }  # fmt: skip
    if inputs.rollout_log_probs is not None:
        batch["sampling_per_token_logps"] = inputs.rollout_log_probs.to(dtype)
    if inputs.ref_log_probs is not None:
        batch["ref_per_token_logps"] = inputs.ref_log_probs.to(dtype)
    loss = trainer._compute_loss(trainer.model, batch)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient


@pytest.mark.parametrize(("name", "settings", "config"), CASES, ids=str)
def test_loss_and_gradient_equal_trl(name, settings, config, tmp_path):
    policy, trainer = rule(name, settings), trainer_of(tmp_path, name, **config)
    for seed in range(4):
        inputs = shared_inputs(policy, seed)
        if name not in ("sapo", "vespo"):  # these never cut
            assert 0.1 < clipped_share(policy, inputs) < 0.45
        assert_agree(theirs(trainer, inputs), ours(policy, inputs))


def test_the_test_cases_exercise_their_settings():
    # a dual clip that is never reached, or a mask that drops nothing, would agree with any result
    for name, settings, without in (("grpo", {"dual_clip": 1.3}, {}), ("opsm", {"delta": 0.02}, {"delta": 20.0})):
        policy = rule(name, settings)
        inputs = shared_inputs(policy)
        assert (ours(policy, inputs)[1] != ours(rule(name, without), inputs)[1]).any()


def test_the_unbiased_kl_equals_trl(tmp_path):
    coefficient, policy = 0.3, rule("grpo", {})
    trainer = trainer_of(tmp_path, loss_type="grpo", beta=coefficient, use_bias_correction_kl=True)
    for seed in range(4):
        inputs = shared_inputs(policy, seed)
        noise = torch.randn(inputs.log_probs.shape, generator=torch.Generator().manual_seed(seed))
        inputs = dataclasses.replace(inputs, ref_log_probs=inputs.log_probs + 0.3 * noise)
        log_probs = inputs.log_probs.detach().clone().requires_grad_()
        counts = StepCounts(len(log_probs), int(inputs.response_mask.sum()))
        kl = kl_estimate(log_probs, inputs.ref_log_probs, "unbiased_k3", inputs.old_log_probs)
        penalty = coefficient * reduce_objective(kl, inputs.response_mask, policy.reduction, counts, MAX_LENGTH)
        (gradient,) = torch.autograd.grad(penalty, log_probs)
        loss, plain = ours(policy, inputs)
        assert gradient.abs().max() > 0.01 * plain.abs().max()
        assert_agree(theirs(trainer, inputs), (loss + penalty.item(), plain + gradient.double()))


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_top_entropy_equals_trl_which_divides_by_all_tokens(share, tmp_path):
    policy = rule("top-entropy", {"top_share": share})
    trainer = trainer_of(tmp_path, loss_type="bnpo", epsilon_high=0.28, top_entropy_quantile=share)
    for seed in range(4):
        inputs = shared_inputs(policy, seed)
        noise = torch.rand(inputs.log_probs.shape, generator=torch.Generator().manual_seed(seed))
        inputs = dataclasses.replace(inputs, old_entropy=noise * inputs.old_entropy)
        tokens = int(inputs.response_mask.sum())
        loss, gradient = theirs(trainer, inputs)
        times = tokens / math.ceil(share * tokens)
        assert_agree((loss * times, gradient * times), ours(policy, inputs))


@pytest.mark.parametrize(("name", "settings", "config"), [CASES[0], CASES[3], CASES[4], CASES[6], CASES[9], CASES[10]], ids=str)
def test_micro_batches_get_the_same_share_of_the_step(name, settings, config, tmp_path):
    policy = rule(name, settings)
    inputs = shared_inputs(policy)
    counts = StepCounts(len(inputs.response_mask), int(inputs.response_mask.sum()))
    trainer = trainer_of(tmp_path, name, gradient_accumulation_steps=2, **config)
    for rows in torch.arange(24).chunk(2):
        half = rows_of(inputs, rows)
        assert_agree(theirs(trainer, half, counts.num_tokens), ours(policy, half, counts))


def rows_of(inputs, rows):
    values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return ClipInputs(**{name: value[rows] if torch.is_tensor(value) else value for name, value in values.items()})


# Differences: each test states one, and checks that there is no other on its data.


def test_bnpo_divides_by_the_tokens_of_the_micro_batch_rather_than_of_the_step(tmp_path):
    policy = rule("grpo", {"reduction": "token_mean"})
    inputs = shared_inputs(policy)
    half = rows_of(inputs, torch.arange(12))
    tokens, all_tokens = int(half.response_mask.sum()), int(inputs.response_mask.sum())
    assert tokens != all_tokens / 2
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=2, loss_type="bnpo")
    loss, gradient = theirs(trainer, half)
    assert_agree((loss * 2 * tokens / all_tokens, gradient * 2 * tokens / all_tokens),
                 ours(policy, half, StepCounts(24, all_tokens)))  # fmt: skip


def test_dapo_divides_by_the_mean_step_of_the_generation_rather_than_by_its_own(tmp_path):
    policy = rule("grpo", {"reduction": "token_mean"})
    inputs = shared_inputs(policy)
    tokens = int(inputs.response_mask.sum())
    trainer = trainer_of(tmp_path, loss_type="dapo", steps_per_generation=2)  # a generation lasts for two steps
    loss, gradient = theirs(trainer, inputs, num_items=3 * tokens)  # the other step has twice our tokens
    assert_agree((loss * 3 / 2, gradient * 3 / 2), ours(policy, inputs))


EMPTY = [CASES[0], CASES[3], CASES[6], CASES[9], CASES[12], CASES[17], CASES[19]]


@pytest.mark.parametrize(("name", "settings", "config"), EMPTY, ids=str)
def test_trl_counts_responses_without_tokens(name, settings, config, tmp_path):
    policy = rule(name, settings)
    inputs = shared_inputs(policy)
    mask = inputs.response_mask.clone()
    mask[:6] = False  # like mask_truncated_completions
    inputs = dataclasses.replace(inputs, response_mask=mask)
    loss, gradient = theirs(trainer_of(tmp_path, name, **config), inputs)
    # an empty sum is 0 and its ratio 1: such a response adds -A to the loss, and nothing to the gradient
    if name in ("gmpo", "rloo"):
        loss += inputs.advantages[:6].sum().item() / 24
    assert_agree((loss * 24 / 18, gradient * 24 / 18), ours(policy, inputs))


def test_delta_below_the_upper_clip_is_no_dual_clip_in_trl(tmp_path):
    # one response per case: ratios 1.15 and 1.5 for both signs, delta 1.1 < 1 + 0.2
    log_ratio = torch.tensor([[1.15], [1.5], [1.15], [1.5]]).log()
    old = torch.full((4, 1), -1.0)
    inputs = ClipInputs(old + log_ratio, old, torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]), torch.ones(4, 1, dtype=torch.bool))
    policy = rule("grpo", {"dual_clip": 1.1})
    # a dual clip (arXiv 1912.09729): A > 0 is cut only above 1.2, A < 0 above 1.1
    assert -4 * ours(policy, inputs)[1][:, 0] == pytest.approx([1.15, 0, 0, 0])
    # TRL: A > 0 is also cut above 1.1, A < 0 only above 1.2
    loss, gradient = theirs(trainer_of(tmp_path, loss_type="grpo", delta=1.1), inputs)
    assert (-4 * gradient[:, 0]).tolist() == pytest.approx([0, 0, -1.15, 0])
    assert -4 * loss == pytest.approx(1.1 + 1.1 - 1.15 - 1.2)


def test_delta_above_the_upper_clip_is_a_dual_clip_far_off_policy(tmp_path):
    policy, trainer = rule("grpo", {"dual_clip": 1.3}), trainer_of(tmp_path, loss_type="grpo", delta=1.3)
    inputs = shared_inputs(policy)
    wide = inputs.old_log_probs + 6 * (inputs.log_probs - inputs.old_log_probs)
    inputs = dataclasses.replace(inputs, log_probs=wide)
    assert_agree(theirs(trainer, inputs), ours(policy, inputs))


def test_vespo_stops_at_another_lower_limit(tmp_path):
    # S = -19, between TRL's log(1e-8) = -18.42 and our -20; one token, A = 1: phi = exp(3 + 2 S - 3 exp(S))
    one = torch.ones(1, 1)
    inputs = ClipInputs(-20 * one, -one, one, one.bool())
    _, gradient = theirs(trainer_of(tmp_path, loss_type="vespo"), inputs)
    assert -gradient.item() == pytest.approx(math.exp(3 + 2 * math.log(1e-8) - 3e-8))
    assert -ours(rule("vespo", {}), inputs)[1].item() == pytest.approx(math.exp(3 - 38 - 3 * math.exp(-19)), rel=1e-5)


def test_cispo_of_trl_caps_at_epsilon_high_itself(tmp_path):
    # 0.2 by default: the weight of a token at ratio 1 is then 0.2; the cap of MiniMax-M1, 1 + 0.2, is epsilon_high=1.2
    one = torch.ones(1, 1)
    inputs = ClipInputs(-one, -one, one, one.bool())
    assert -theirs(trainer_of(tmp_path, loss_type="cispo"), inputs)[1].item() == pytest.approx(0.2)
    assert -theirs(trainer_of(tmp_path, loss_type="cispo", epsilon_high=1.2), inputs)[1].item() == 1
    assert -ours(rule("cispo", {"clip_high": 0.2}), inputs)[1].item() == 1


def test_a_large_log_ratio_gives_nan_in_trl(tmp_path):
    # float32, log-ratio 100: exp is infinite, and 0 * inf in the backward pass of the clipped branch is NaN
    one = torch.ones(2, 1)
    inputs = ClipInputs(99 * one, -one, torch.tensor([[1.0], [0.0]]), one.bool())
    loss, gradient = theirs(trainer_of(tmp_path, loss_type="grpo"), inputs, dtype=torch.float32)
    assert math.isnan(loss)  # from the response with A = 0
    assert gradient.isnan().all()
    our_loss, our_gradient = ours(rule("grpo", {}), inputs)
    assert our_loss == pytest.approx(-1.2 / 2)
    assert (our_gradient == 0).all()


def test_opsm_of_trl_takes_an_unknown_sampler_log_prob_as_no_evidence(tmp_path):
    # a response of two tokens with A < 0, the first log-prob 1 below the sampler's; the sampler's second is missing
    inputs = ClipInputs(
        torch.tensor([[-2.0, -1.0]]), torch.tensor([[-2.0, -1.0]]), torch.tensor([[-1.0]]),
        torch.ones(1, 2, dtype=torch.bool), torch.tensor([[-1.0, math.nan]]),
    )  # fmt: skip
    _, gradient = theirs(trainer_of(tmp_path, loss_type="grpo", off_policy_mask_threshold=0.4), inputs)
    assert (gradient == 0).all()  # dropped: the mean of (1, 0) is above 0.4
    assert (ours(rule("opsm", {"delta": 0.4}), inputs)[1] == 0.5).all()  # kept: the mean is NaN
