"""Runs with a critic: what they save, resume, record and measure, and what is refused."""

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import rlzoo
from rlzoo import RunConfig, UserError
from rlzoo.core.errors import PolicyError
from rlzoo.gate.enter import enter
from rlzoo.gate.settings import Start, check_settings
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.tasks.task import seeded
from rlzoo.training.after_step import is_spike
from rlzoo.training.metrics import critic_metrics
from tests.learner.test_critic import episode_batch, make_learner
from tests.off_policy import make_model
from tests.training.short import lines, quick, resumes_after, without_times

CRITIC = ["clip.advantage=gae", "critic.lr=1e-3", "critic.updates=2", "tracking.mlflow=false", "eval.num_problems=0"]

KILLER = '''
"""GRPO that kills its process, or fails, in step 3: after the critic's updates on a minibatch, before the model's."""
import os, pathlib, signal
from rlzoo import hookimpl
from rlzoo_grpo import GRPO as Base

HERE = pathlib.Path(__file__).parent.parent


class Killer(Base):
    """GRPO."""

    name = "killer"
    needs = frozenset({"progress"})

    def __call__(self, inputs):
        if (HERE / "armed").exists() and inputs.progress >= 0.5:
            if (HERE / "armed").read_text() == "fail":
                raise RuntimeError("armed")
            os.kill(os.getpid(), signal.SIGKILL)
        return Base.__call__(self, inputs)


@hookimpl
def rlzoo_clip_policies():
    return [Killer]
'''


@pytest.fixture
def killer(tmp_path):
    """A plugin whose rule does something bad while the file ``armed`` exists."""
    (tmp_path / "plugin").mkdir()
    (tmp_path / "plugin" / "killer.py").write_text(KILLER)
    return tmp_path / "plugin" / "killer.py"


def config(folder, *overrides, clip="grpo", steps=4, **settings):
    return quick(folder, clip=clip, steps=steps, overrides=[*CRITIC, "checkpoint.every=2", *overrides], **settings)


@pytest.mark.long
@pytest.mark.parametrize("moment", ["after a checkpoint of the warm-up", "between the updates of the critic and the model"])
def test_a_killed_run_resumes_bit_for_bit(moment, killer, tmp_path):
    warmup = "critic.warmup_steps=3" if moment.startswith("after") else "critic.warmup_steps=1"
    settings = {"clip": "killer", "plugins": [killer]}
    whole = rlzoo.train(config(tmp_path / "whole", warmup, **settings))
    killed = config(tmp_path / "killed", warmup, **settings)
    script = f"""
import os, signal, rlzoo
from pathlib import Path
from tests.training.test_critic import config
def observer(step, row):
    if step == 3 and {moment.startswith("after")}:
        os.kill(os.getpid(), signal.SIGKILL)
rlzoo.train(config(Path({str(killed.output)!r}), {warmup!r}, clip="killer", plugins=[{str(killer)!r}]), observer)
"""
    armed = killer.parent.parent / "armed"
    if not moment.startswith("after"):
        armed.write_text("kill")
    process = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], env=os.environ, check=False)
    assert process.returncode == -signal.SIGKILL
    armed.unlink(missing_ok=True)
    with resumes_after(2, killed.output):
        result = rlzoo.train(killed, resume=True)
    assert without_times(lines(result.path / "metrics.jsonl")) == without_times(lines(whole.path / "metrics.jsonl"))
    files = [path.relative_to(whole.path) for path in (whole.path / "checkpoints" / "step-000004").rglob("*.safetensors")]
    assert {"optimizer.safetensors", "value_head.safetensors"} <= {file.name for file in files}
    for file in files:
        torch.testing.assert_close(
            load_file(result.path / file), load_file(whole.path / file), rtol=0, atol=0, equal_nan=True, msg=str(file)
        )


def test_a_step_that_fails_after_the_critics_update_is_not_saved(killer, tmp_path):
    (killer.parent.parent / "armed").write_text("fail")
    with pytest.raises(PolicyError, match="armed"):
        rlzoo.train(config(tmp_path / "run", "checkpoint.every=0", clip="killer", plugins=[killer]))
    assert [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]


def opened(run):
    """Return a run's learner, as it is before the first step."""
    with seeded(run.task, run.seed) as task:
        admission = enter(run, task)
        admission.close()
    return admission.learner


@pytest.mark.long
def test_a_critic_starts_from_a_saved_critic_or_another_model(tmp_path):
    result = rlzoo.train(config(tmp_path / "run", steps=2))
    saved = result.path / "checkpoints" / "step-000002" / "critic"
    again = opened(config(None, f"critic.model={saved}"))
    for name, tensor in again.critic.module.state_dict().items():
        part, _, rest = name.partition(".")
        stored = load_file(saved / ("value_head.safetensors" if part == "head" else "model.safetensors"))
        if rest in stored:
            assert torch.equal(tensor, stored[rest]), name
    assert again.critic.module.head.weight.any()
    plain = opened(config(None, f"critic.model={result.path / 'checkpoints' / 'step-000002'}"))
    assert not plain.critic.module.head.weight.any()
    with pytest.raises(UserError, match=r"critic\.model='embedded-guess': another tokenizer"):
        opened(config(None, "critic.model=embedded-guess"))


@pytest.mark.long
def test_rollout_files_hold_the_values_and_recorded_runs_compute_their_own(tmp_path):
    result = rlzoo.train(config(tmp_path / "run", steps=2))
    first, second = (RolloutFile.load(result.path / "rollouts" / f"{step:06d}.safetensors") for step in (1, 2))
    assert not first.values.any()  # the head starts at 0
    assert second.values.any()
    assert second.values.shape == second.old_log_probs.shape
    assert second.last_values.shape == second.rewards.shape
    for row in lines(result.path / "metrics.jsonl")[1:]:
        assert {"critic/loss", "critic/grad_norm", "critic/explained_variance", "critic/nonfinite"} <= row.keys()
    overrides = [*CRITIC, f"rollout.recorded={result.path}", "rollout.engine=recorded"]
    recorded = rlzoo.train(RunConfig.compose(clip="grpo", overrides=overrides, steps=2, output=tmp_path / "recorded"))
    # the first file has the values of a head at 0; a critic that has learned from it gives the second batch other values
    again = RolloutFile.load(recorded.path / "rollouts" / "000002.safetensors")
    assert again.values.any()


def test_a_spike_of_the_critics_gradient_counts_and_a_roll_back_restores_both(tmp_path):
    calm = [{"learner/grad_norm": 1.0, "critic/grad_norm": 1.0}] * 10
    assert is_spike({"learner/grad_norm": 1.0, "critic/grad_norm": 9.0}, calm, 8.0)
    assert not is_spike({"learner/grad_norm": 1.0, "critic/grad_norm": 7.0}, calm, 8.0)

    learner, batch = make_learner(make_model()), episode_batch()
    learner.update(learner.score(batch))
    learner.save(tmp_path / "state")
    before = [module.state_dict() for module in (copy.deepcopy(learner.language_model), copy.deepcopy(learner.critic.module))]
    learner.update(learner.score(batch))
    learner.load(tmp_path / "state", learner.num_optimizer_steps, learner.scheduler.last_epoch)
    for module, expected in zip((learner.language_model, learner.critic.module), before, strict=True):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in module.state_dict().items())


REFUSED = {
    "critic.lr=1e-3": "critic.lr=0.001: advantage 'group_norm' has no critic; remove the setting, or set clip.advantage=gae",
    "clip.advantage=gae critic.frozen=[(]": "critic.frozen=['(']: '(' is not a regular expression: missing )",
    "clip.advantage=gae critic.model=nowhere/at/all": "critic.model='nowhere/at/all': no such folder",
    "clip.name=gspo clip.advantage=gae": "its values differ between tokens, but gspo accepts only one value per response",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_a_critic_cannot_do_is_refused_in_one_line(overrides):
    if "deepspeed" in overrides:
        pytest.importorskip("deepspeed")  # otherwise, the missing library is the first reason

    def ask():
        run = RunConfig.compose(clip=None if "clip.name" in overrides else "grpo", overrides=overrides.split())
        check_settings(run, Start(1))

    with pytest.raises(UserError) as refused:
        ask()
    assert REFUSED[overrides] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_explained_variance_worked_by_hand():
    batch = episode_batch()
    learner = make_learner(make_model(), critic={})
    scored = learner.score(batch)
    mask = scored.response_mask & scored.graded[:, None]
    values, targets = scored.values[mask], scored.value_targets[mask]
    metrics = critic_metrics(scored, [])
    expected = 1 - float(
        ((targets - values) - (targets - values).mean()).square().sum() / (targets - targets.mean()).square().sum()
    )
    assert metrics["critic/explained_variance"] == pytest.approx(expected, rel=1e-5)
    assert {"critic/explained_variance_first", "critic/explained_variance_last"} <= metrics.keys()
    assert "critic/loss" not in metrics
