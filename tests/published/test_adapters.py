"""The adapter in examples/: any clip policy as the loss of TRL's trainer."""

import math

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl_trainer import ClipPolicyTrainer, share_of_digits

from rlzoo import load_zoo
from rlzoo.models.pretrained import load_pretrained
from rlzoo.reductions import StepCounts
from tests.published.shared import assert_agree

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # transformers' own deprecations
ZOO = load_zoo()


def trainer_of(folder, policy=None, **settings):
    """Ours, or TRL's own where there is no policy; two steps of two micro-batches from one generation."""
    model, tokenizer = load_pretrained("embedded")
    config = {
        "output_dir": str(folder), "report_to": "none", "save_strategy": "no", "use_cpu": True, "bf16": False,
        "gradient_checkpointing": False, "disable_tqdm": True, "max_steps": 2, "logging_steps": 1, "learning_rate": 1e-3,
        "per_device_train_batch_size": 8, "num_generations": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4,
        "max_completion_length": 12, **settings,
    }  # fmt: skip
    with torch.no_grad():  # noise on the weights, or every response would be as short and as good as the next
        torch.manual_seed(0)
        for weight in model.parameters():
            weight.add_(0.5 * weight.std() * torch.randn_like(weight) if weight.dim() > 1 else 0.0)
    prompts = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(1, 9) for b in range(1, 9)]})
    kind, more = (GRPOTrainer, {}) if policy is None else (ClipPolicyTrainer, {"policy": policy})
    return kind(model=model, processing_class=tokenizer, args=GRPOConfig(**config), train_dataset=prompts,
                reward_funcs=share_of_digits, **more)  # fmt: skip


@pytest.mark.parametrize("name", ["fspo", "gspo", "grpo"])
def test_the_trl_trainer_trains(name, tmp_path):
    trainer = trainer_of(tmp_path, ZOO[name]())
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    trainer.train()
    steps = [row for row in trainer.state.log_history if "clip_fraction" in row]
    assert [math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in steps] == [True, True]
    assert steps[0]["clip_fraction"] == 0  # nothing has moved yet
    if name == "gspo":  # the narrowest of the three
        assert steps[1]["clip_fraction"] > 0  # the second step is off-policy
    assert any(not torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def off_policy_batches(trainer):
    """The micro-batches of one generation as TRL buffers them: ragged, and off what the model says."""
    rng = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(trainer.args.steps_per_generation):
        mask = torch.arange(12) < torch.randint(1, 13, (8, 1), generator=rng)
        prompt, completion = torch.full((8, 3), 5), torch.randint(3, 14, (8, 12), generator=rng)
        both, attention = torch.cat([prompt, completion], 1), torch.cat([torch.ones(8, 3), mask], 1).long()
        with torch.no_grad():
            log_probs = trainer._get_per_token_logps_and_entropies(trainer.model, both, attention, 12)[0]
        batches.append({
            "prompt_ids": prompt, "prompt_mask": attention[:, :3], "completion_ids": completion,
            "completion_mask": attention[:, 3:], "advantages": torch.randn(8, generator=rng),
            "old_per_token_logps": log_probs + 0.3 * torch.randn(8, 12, generator=rng),
        })  # fmt: skip
    for batch in batches:
        batch["num_items_in_batch"] = sum(batch["completion_mask"].sum() for batch in batches)
    return batches


@pytest.mark.parametrize(
    ("settings", "config"),
    [({}, {"loss_type": "grpo"}), ({"reduction": "constant_length"}, {"loss_type": "dr_grpo"}),
     ({"reduction": "token_mean"}, {"loss_type": "dapo", "steps_per_generation": 2})],
    ids=str,
)  # fmt: skip
def test_the_trl_trainer_with_grpo_equals_trls_own(settings, config, tmp_path):
    ours_alone = {name: value for name, value in config.items() if name != "loss_type"}
    trainers = [trainer_of(tmp_path, ZOO["grpo"](**settings), **ours_alone), trainer_of(tmp_path, **config)]
    batches = off_policy_batches(trainers[0])
    trainers[0]._buffered_inputs = batches
    for step, batch in enumerate(batches):
        results = []
        for trainer in trainers:
            trainer.model.train()
            trainer._step, trainer.current_gradient_accumulation_steps = step, 2
            loss = trainer._compute_loss(trainer.model, batch)
            gradient = torch.autograd.grad(loss, list(trainer.model.parameters()))
            results.append((loss.item(), torch.cat([part.flatten() for part in gradient])))
        assert_agree(results[1], results[0])
    assert min(trainers[0]._metrics["train"]["clip_fraction"]) > 0.1


def test_the_trl_trainer_counts_the_whole_step(tmp_path):
    trainer = trainer_of(tmp_path, ZOO["grpo"]())
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    masks = [torch.arange(5) < torch.tensor(length)[:, None] for length in ([5, 2], [1, 0], [3, 3], [4, 4])]
    trainer._buffered_inputs = [{"completion_mask": mask.long()} for mask in masks]
    trainer._buffered_inputs[3]["tool_mask"] = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 1]])
    counts = []
    for trainer._step in range(8):
        counts.append(trainer.step_counts(trainer._buffered_inputs[trainer._step % 4]))
    # the first step holds 5 + 2 + 1 tokens in 3 responses, the second 3 + 3 + 2 + 0 in 3; then both again
    assert counts == 2 * [StepCounts(3, 8), StepCounts(3, 8), StepCounts(3, 8), StepCounts(3, 8)]
    trainer.model.eval()
    assert trainer.step_counts(trainer._buffered_inputs[0]) == StepCounts(2, 7)


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [(ZOO["grpo"](), {"beta": 0.1, "delta": 2.0}, "beta, delta: the loss is the policy's"),
     (ZOO["grpo"](), {"loss_type": "grpo"}, "loss_type: "),
     (ZOO["m2po"](), {}, "m2po judges a whole step"),
     (ZOO["fspo-adaptive"](), {}, "fspo-adaptive adapts to the run"),
     (ZOO["turn-ratio"](), {}, "turn-ratio needs turn_ids"),
     (ZOO["grpo"](), {"steps_per_generation": 1}, "multiple of gradient_accumulation_steps")],
    ids=str,
)  # fmt: skip
def test_the_trl_trainer_refuses_what_it_would_ignore(policy, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, policy, **settings)


def test_the_trl_trainer_takes_a_batch_rule_whose_step_is_one_micro_batch(tmp_path):
    trainer = trainer_of(tmp_path, ZOO["m2po"](), gradient_accumulation_steps=1, steps_per_generation=2)
    trainer.train()
    assert trainer.state.global_step == 2
