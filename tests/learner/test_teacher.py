"""A teacher scores the responses: its log-probs, the step that follows from them, and what does not change them."""

import copy
import dataclasses
import math

import pytest
import torch

from rlzoo import RunConfig, load_zoo
from rlzoo.config.sections import LaunchConfig, LearnerConfig
from rlzoo.core.errors import RunError, UserError
from rlzoo.learner.batch import collate
from rlzoo.learner.learner import Learner
from rlzoo.learner.teacher import Teacher
from rlzoo.models.adapters import has_adapter
from rlzoo.models.processes import make_accelerator
from rlzoo.rollout.kept import KeptSets
from tests.learner.test_kept import dense, groups, model  # noqa: F401
from tests.learner.test_learner import relative_error
from tests.off_policy import PAD, VOCABULARY, make_model, off_policy_batch, take_step

TEMPERATURE = 0.7


def make_teacher(other, temperature=TEMPERATURE, longest=40, offload=False, **settings):
    more = [f"rollout.temperature={temperature}", f"model.reference_offload={str(offload).lower()}"]
    config = RunConfig.compose(clip="opd", overrides=[*more, *(f"learner.{name}={value}" for name, value in settings.items())])
    frozen = copy.deepcopy(other).eval().requires_grad_(False)
    return Teacher(frozen, make_accelerator(LaunchConfig(), config.learner), config, longest)


def make_learner(student, teacher, clip="opd", **settings):
    config = LearnerConfig(**{"max_grad_norm": None, "lr": 1e-3, "num_minibatches": 1, **settings})
    kinds = {"pad_id": PAD, "max_length": 30, "num_updates": 10, "temperature": TEMPERATURE}
    return Learner(copy.deepcopy(student), load_zoo()[clip](), config, **kinds, teacher=teacher)


def float64_log_probs(other, batch, temperature=TEMPERATURE):
    """Return ``(B, T)`` with gradient, row by row over the model's own head, and 0 outside the mask."""
    width, rows = batch.response_mask.shape[1], []
    for row, sequence in enumerate(batch.sequences):
        length = len(sequence) - int(batch.prompt_lengths[row])
        logits = other(input_ids=sequence[None]).logits[0, -length - 1 : -1] / temperature
        chosen = logits.log_softmax(-1).gather(-1, sequence[-length:, None])[:, 0]
        rows.append(torch.nn.functional.pad(chosen, (0, width - length)))
    return torch.where(batch.response_mask, torch.stack(rows), 0.0)


@pytest.fixture(scope="module")
def student():
    return make_model()


@pytest.fixture(scope="module")
def larger():
    """A model with other weights, whose head is padded to more tokens than the student's."""
    return make_model(seed=5, vocabulary=VOCABULARY + 31)


@pytest.fixture(scope="module")
def batch(student):
    return off_policy_batch(student, load_zoo()["opd"]())


@pytest.fixture(scope="module")
def expected(student, larger, batch):
    """The advantages and the gradient of a distillation step, in float64."""
    with torch.no_grad():
        teacher = float64_log_probs(copy.deepcopy(larger).double(), batch)
    wide = copy.deepcopy(student).double()
    log_probs = float64_log_probs(wide, batch)
    advantages = teacher - log_probs.detach()
    loss = -(torch.exp(log_probs - log_probs.detach()) * advantages)[batch.response_mask].mean()
    loss.backward()
    return advantages, torch.cat([parameter.grad.flatten() for parameter in wide.parameters()])


@pytest.mark.parametrize(
    "settings", [{}, {"max_tokens_per_micro_batch": 1}, {"max_tokens_per_micro_batch": 60}, {"packing": True}], ids=str
)
def test_a_step_of_distillation_equals_the_float64_oracle(student, larger, batch, expected, settings):
    learner = make_learner(student, make_teacher(larger, **{k: str(v).lower() for k, v in settings.items()}), **settings)
    assert learner.reference is None
    scored = learner.score(batch)
    advantages, gradient = expected
    torch.testing.assert_close(scored.advantages.double(), advantages, atol=1e-5, rtol=1e-5)
    assert scored.advantages[batch.response_mask].abs().mean() > 0.1
    learner.accumulate(scored, torch.arange(len(batch)))
    got = torch.cat([parameter.grad.flatten() for parameter in learner.model.parameters()])
    assert relative_error(got.double(), gradient) < 1e-5


def test_offloading_autocast_and_the_temperature_of_the_run(student, larger, batch, expected):
    plain = make_teacher(larger).log_probs(batch)
    assert torch.equal(make_teacher(larger, offload=True, autocast="bfloat16").log_probs(batch), plain)
    assert (make_teacher(larger, temperature=1.0).log_probs(batch) - plain).abs().max() > 0.1
    half = make_teacher(copy.deepcopy(larger).bfloat16()).log_probs(batch)
    assert 1e-4 < (half - plain).abs().max() < 1


def test_the_reward_and_the_loss_compare_with_the_teacher(student, larger, batch):
    teacher = make_teacher(larger)
    scored = make_learner(student, teacher, "grpo", kl_coef=0.1).score(batch)
    assert torch.equal(scored.ref_log_probs, teacher.log_probs(batch))
    with torch.no_grad():
        torch.testing.assert_close(
            scored.ref_log_probs.double(), float64_log_probs(copy.deepcopy(larger).double(), batch), atol=1e-5, rtol=0
        )


def test_a_low_rank_update_learns_from_the_teacher_and_not_from_its_base(student, larger, batch):
    teacher = make_teacher(larger)
    learner = make_learner(student, teacher, lora={"rank": 4}, lr=1e-2)
    assert has_adapter(learner.language_model)
    assert torch.equal(learner.reference_log_probs(batch), teacher.log_probs(batch))
    before = [parameter.clone() for parameter in larger.parameters()]
    take_step(learner, learner.score(batch))
    assert torch.equal(learner.reference_log_probs(batch), teacher.log_probs(batch))
    assert all(torch.equal(*pair) for pair in zip(before, teacher.module.parameters(), strict=True))


def test_the_teacher_is_renormalised_over_the_tokens_that_the_sampler_kept(model, groups):  # noqa: F811
    teacher, rows = make_model(seed=5, vocabulary=VOCABULARY + 31), collate(groups)
    got = make_teacher(teacher, temperature=1.0, longest=None).log_probs(rows)[rows.response_mask]
    log_probs, _ = dense(copy.deepcopy(teacher).double(), groups, rows.response_mask.shape[1])
    expected = log_probs[rows.response_mask]
    assert expected.isfinite().all()
    torch.testing.assert_close(got.double(), expected.detach(), atol=1e-5, rtol=0)


def test_a_token_that_the_teacher_lacks_ends_the_run_in_one_line(student, batch):
    teacher = make_teacher(make_model(seed=5, vocabulary=VOCABULARY - 7))
    fits = dataclasses.replace(batch, sequences=tuple(row.clamp(max=VOCABULARY - 8) for row in batch.sequences))
    assert teacher.log_probs(fits).isfinite().all()
    message = rf"^model.reference lacks token {VOCABULARY - 1}, which the sampler drew or kept; [^\n]*$"
    with pytest.raises(RunError, match=message):
        make_learner(student, teacher).score(batch)
    number = int(batch.response_mask.sum())
    kept = KeptSets.of([VOCABULARY - 1] + [2] * (number - 1), [1] * number)
    with pytest.raises(RunError, match=message):
        teacher.log_probs(dataclasses.replace(fits, kept=kept))


def test_a_teacher_that_cannot_score_the_rows_is_refused(larger):
    with pytest.raises(UserError, match=r"^model.reference takes 128 tokens, but rows may have 129; [^\n]*$"):
        make_teacher(larger, longest=129)
    broken = copy.deepcopy(larger)
    with torch.no_grad():
        broken.model.norm.weight[0] = math.nan
    with pytest.raises(UserError, match=r"^model.reference: Qwen3ForCausalLM has logits that are not finite; [^\n]*$"):
        make_teacher(broken)
