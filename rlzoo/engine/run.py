"""The pieces of one run, and what one step does with them."""

from __future__ import annotations

import gc
import logging
import shlex
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from safetensors import SafetensorError
from torch import nn

from rlzoo.config import RunConfig
from rlzoo.engine.checkpoints import own_checkpoints
from rlzoo.engine.collect import Batch
from rlzoo.engine.experience import Experience
from rlzoo.engine.learner import Learner, Update
from rlzoo.engine.manifest import damage
from rlzoo.engine.metrics import is_spike, mean_version, policy_settings, rollout_metrics, update_metrics
from rlzoo.engine.mismatch import mismatch_metrics
from rlzoo.engine.monitor import WINDOW, Monitor
from rlzoo.engine.optimization import is_shared, is_spread, kept_weights
from rlzoo.engine.passes import gather
from rlzoo.engine.pretrained import eos_token_ids, load_named
from rlzoo.engine.processes import make_accelerator, peak_memory
from rlzoo.engine.prompts import check_task
from rlzoo.engine.rollout import Sampler
from rlzoo.engine.run_directory import RunDirectory, why_not_written, writing
from rlzoo.engine.samplers import make_sampler
from rlzoo.engine.sampling import RolloutSource
from rlzoo.engine.seeds import LEARNER, step_seed
from rlzoo.engine.shaping import reward_metrics
from rlzoo.engine.state import RunState, newest_state
from rlzoo.errors import PolicyError, RunError, UserError
from rlzoo.tasks import Task
from rlzoo.types import RolloutGroup

logger = logging.getLogger("rlzoo")


class Run:
    """What samples, grades, learns, measures and writes for one run, made from its configuration.

    Example:
        ``run = Run(config, task)``, then for every step ``run.report(step, run.step(step))``.
    """

    def __init__(self, config: RunConfig, task: Task, *, resume: bool = False) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        name = f"{config.clip.name}-{task.name.replace(':', '-')}-{config.seed}-{stamp}"
        self.accelerator = make_accelerator(config.launch, config.learner, dtype=config.model.dtype)
        self.is_main = self.accelerator.is_main_process
        path = gather(self.accelerator, [config.output or Path("runs") / name])[0]  # the clock may differ
        self.config = config.model_copy(update={"output": path})
        self.task = task
        with ExitStack() as failed:
            checkpoint = None
            if resume:
                self.directory, checkpoint = self._reopen(path)
                failed.callback(self.directory.close)
            elif self.is_main:
                RunDirectory.check_free(path)
            self._prepare()
            if resume:
                self._restore(checkpoint)
            else:
                self.directory = RunDirectory.create(path, self.config.to_yaml(), config.plugins, is_writer=self.is_main)
            # all processes write into the same temporary folders; only the main one is sure to see the file with the identity
            self.directory.identity = gather(self.accelerator, [self.directory.identity if self.is_main else ""])[0]
            failed.pop_all()

    def _reopen(self, path: Path) -> tuple[RunDirectory, Path | None]:
        """The run directory, and the state to resume from as the main process finds it; all processes raise what it raises."""
        found: Path | Exception | None = None
        with ExitStack() as failed:
            if self.is_main:
                try:
                    directory = RunDirectory.resume(path)
                    failed.callback(directory.close)
                    found = newest_state(path)
                except (UserError, OSError) as error:
                    found = error
            found = gather(self.accelerator, [found])[0]
            if isinstance(found, Exception):
                raise found
            failed.pop_all()
        return (directory if self.is_main else RunDirectory(path, is_writer=False)), found

    def _prepare(self) -> None:
        """Load the model and make what samples, learns and measures."""
        config = self.config
        self.model, self.tokenizer = load_named(config.model)
        self._check_prompts()
        # before the learner's: ZeRO-3 takes the model apart, and an adapter changes its modules
        self.source = RolloutSource(config, self.task, self._make_sampler(), self.accelerator)
        self.learner = self._make_learner()
        self.monitor = Monitor(config.clip)
        self.metrics: list[dict[str, float]] = []
        self.done = 0  # steps
        self._began, self._before = time.perf_counter(), 0.0
        self._saved = -1  # the step that was saved last
        self._is_clean = True  # everything is as it was after the last step that is done
        self._given = -1  # optimizer steps of the weights the sampler has; not known before it was given any

    def _check_prompts(self) -> None:
        """Refuse questions that cannot be put to the model, before anything is written."""
        config = self.config
        check_task(
            self.task,
            self.tokenizer,
            chat_template=config.model.chat_template,
            needed=config.steps * config.rollout.num_prompts,
            held_out=config.eval.num_problems,
        )

    def _make_sampler(self) -> Sampler:
        return make_sampler(
            self.model,
            self.tokenizer,
            eos_token_ids(self.model, self.tokenizer),
            named=self.config.model,
            settings=self.config.rollout,
            own_weights=self.config.rollout.max_staleness > 0 or is_spread(self.accelerator),
        )

    def _make_learner(self) -> Learner:
        config = self.config
        return Learner(
            self.model,
            config.clip,
            config.learner,
            pad_id=int(self.tokenizer.pad_token_id),
            max_length=config.rollout.max_new_tokens,
            num_updates=config.steps * config.learner.num_minibatches * config.learner.num_epochs,
            temperature=config.rollout.temperature,
            reward=config.reward,
            mismatch=config.mismatch,
            accelerator=self.accelerator,
        )

    def _restore(self, folder: Path | None) -> None:
        """Restore the state of a checkpoint; without one, start at step 0."""
        if folder is None:
            logger.warning("%s has no steps yet: starting at step 0", self.directory.path)
            self.directory.cut_after(-1)
            return
        state = RunState.read(folder)
        self._check(state, folder.parent)
        if state.data != self.data:
            raise UserError(
                f"--resume: the training problems of task {self.task.name!r} are not those the run was started with; "
                "put its data back as it was, or start another run"
            )
        self.learner.load(folder, state.num_optimizer_steps, state.scheduler)
        self.learner.num_nonfinite = state.num_nonfinite
        self.source.restore(state.next_problem, state.ahead)
        self.monitor.restore(folder, state.alarms)
        self.done, self._saved, self._before = state.step, state.step, state.seconds
        self.accelerator.wait_for_everyone()
        self.metrics = self.directory.cut_after(state.step)
        if self.source.sampler.needs_weights:
            self.source.sampler.update_weights(self.learner.weights())
        self._given = state.num_optimizer_steps

    def _check(self, state: RunState, folder: Path) -> None:
        """Refuse a state that this run cannot have written, though it is sealed."""
        rollout, problem = self.config.rollout, ""
        rounds = state.step + (state.ahead is not None)
        updates = state.step * self.config.learner.num_minibatches * self.config.learner.num_epochs
        if state.step > self.config.steps:
            problem = f"is of step {state.step}, and the run has {self.config.steps} (steps)"
        elif state.scheduler.get("last_epoch") != updates:
            problem = f"has a learning rate that is not the one after the {updates} updates of {state.step} steps"
        elif state.next_problem % rollout.num_prompts or state.next_problem < rounds * rollout.num_prompts:
            problem = f"has sampled {state.next_problem} problems, which is no {rounds} rounds of {rollout.num_prompts}"
        elif not rollout.dynamic_sampling and state.next_problem != rounds * rollout.num_prompts:
            problem = f"has sampled {state.next_problem} problems, not {rounds * rollout.num_prompts}"
        elif state.ahead is not None and len(state.ahead) != rollout.num_prompts * rollout.group_size:
            problem = f"holds {len(state.ahead)} responses, not {rollout.num_prompts * rollout.group_size}"
        if problem:
            raise UserError(f"--resume: checkpoint {str(folder)!r} {problem}; it does not belong to this run, move it away")

    def summary(self, *, finished: bool) -> dict[str, object]:
        """What ``summary.json`` says of it."""
        return {
            "finished": finished,
            "steps": self.config.steps,
            "peak_memory_bytes": peak_memory(),
            "warnings": self.monitor.alarms.raised,
        }

    def step(self, step: int) -> dict[str, float]:
        """One rollout batch and everything learned from it; if that fails before anything was learned, as if not begun."""
        position = self.source.position()
        try:
            return self._step(step)
        except BaseException:
            if self._is_clean:
                self.source.go_back(position)
            raise

    def _step(self, step: int) -> dict[str, float]:
        started = time.perf_counter()
        batch = self._sample(step)
        groups = batch.groups
        sampled, sampled_at = time.perf_counter(), self.learner.num_optimizer_steps
        settings, limit = self.config.reward, self.config.rollout.max_new_tokens
        experience = replace(Experience.from_groups(groups, self.learner.policy.advantage, settings, limit), step=step)
        experience, updates = self._learn(step, groups, experience)
        learned = time.perf_counter()
        self.directory.record_rollouts(step, groups, experience, updates)
        metrics = self._measured(batch, experience, updates)
        if self.config.rollout.max_staleness:
            metrics["rollout/staleness"] = sampled_at - mean_version(groups)
        metrics |= {
            "time/rollout": sampled - started,
            "time/learner": learned - sampled,
            "throughput/tokens_per_second": int(experience.lengths.sum()) / (learned - started),
        }
        if is_spike(metrics, self.metrics[-WINDOW:], self.config.learner.rollback_above):
            metrics["learner/rolled_back"] = float(self._roll_back(step))
        self._is_clean = False
        self.monitor.after_step(step, [update.table for update in updates], metrics)
        if self.is_due(step, self.config.eval.every) or step == self.config.steps:
            metrics |= self.evaluate()
        return metrics

    def _learn(self, step: int, groups: list[RolloutGroup], experience: Experience) -> tuple[Experience, list[Update]]:
        """The optimizer steps of one batch; none if nothing can be learned from it."""
        self._is_clean = False
        if not self.learner.learns_from(experience) and not self.learner.has_reference:
            self.learner.pass_over(self.config.learner.num_minibatches * self.config.learner.num_epochs)
            return experience, []
        keep = self.is_due(step, self.config.checkpoint.keep_for_replay)
        before = partial(self._keep_weights, step) if keep else None
        try:
            return self.learner.update(experience, step_seed(self.config.seed, LEARNER, step), before)
        except (PolicyError, RunError):
            self.directory.record_rollouts(step, groups, experience, [])  # the data it stumbled over
            raise

    def _roll_back(self, step: int) -> bool:
        """Take the newest periodic checkpoint's weights, and continue with other data; False if there is none yet.

        A checkpoint that was saved because the run was stopped does not count: a run that was never stopped has none.
        """
        periodic = [folder for state, folder in own_checkpoints(self.directory.path, step - 1) if state.periodic]
        folder = next((folder / "state" for folder in reversed(periodic) if damage(folder) is None), None)
        if folder is None:
            logger.warning("step %d: a spike of the gradient, and no checkpoint to roll back to", step)
            return False
        state = RunState.read(folder)
        # the schedule continues from here, so that it still ends with the run
        self.learner.load(folder, state.num_optimizer_steps, self.learner.scheduler.state_dict())
        self.source.forget_ahead()  # sampled by weights that are gone
        logger.warning("step %d: a spike of the gradient; the weights are those after step %d again", step, state.step)
        return True

    def _measured(self, batch: Batch, experience: Experience, updates: list[Update]) -> dict[str, float]:
        """Metrics of one step's data and updates."""
        config, policy = self.config, self.learner.policy
        metrics = rollout_metrics(batch.groups) | reward_metrics(experience, config.reward)
        metrics |= update_metrics(updates, with_kl=config.learner.kl_coef > 0, with_band=policy != config.clip)
        metrics |= policy_settings(policy, config.clip)
        # where the sampler's log-probs may be others than the trainer's
        if updates and (self.source.sampler.needs_weights or config.mismatch.correction != "none"):
            metrics |= mismatch_metrics(experience)
        metrics["reward/failed"] = batch.failed
        return metrics | (batch.metrics() if config.rollout.dynamic_sampling else {})

    def _sample(self, step: int) -> Batch:
        """One step's batch, by the newest weights; where it was sampled ahead, only what dynamic sampling adds to it.

        Weights older than the learner's are never sampled from again, so a checkpoint need not hold them.
        """
        version = self._give_weights()
        batch = self.source.take(step, version)
        if self.config.rollout.max_staleness and step < self.config.steps:
            self.source.look_ahead(step + 1, version)
        return batch

    def _give_weights(self) -> int:
        """Bring the sampler's weights up to date; returns the optimizer steps they have taken."""
        version = self.learner.num_optimizer_steps
        if self.source.sampler.needs_weights and version != self._given:
            self.source.settle()
            self.source.sampler.update_weights(self.learner.weights())
            self._given = version
        return version

    @cached_property
    def data(self) -> str:
        """The fingerprint of the training problems."""
        return self.task.fingerprint()

    def _keep_weights(self, step: int, update: int) -> None:
        self.directory.save_weights(step, update, kept_weights(self.learner.weights(), keep=self.is_main))

    def save(self, step: int) -> None:
        """Save the model after a step that is done, the policy's state beside it, and what it takes to resume from it."""
        name = f"step-{step:06d}"
        try:
            folder = self._begin_checkpoint(name)
            with writing(folder / "state", 3 * _num_bytes(self.learner.language_model)):
                self.accelerator.wait_for_everyone()
                self.learner.save(folder / "state")
                state = self._state(step)  # which takes all processes
                if self.is_main:
                    state.write(folder / "state")
                    self.monitor.save(folder / "state")
                self.accelerator.wait_for_everyone()
            scores = {at: row["eval/accuracy"] for at, row in enumerate(self.metrics) if "eval/accuracy" in row}
            self.directory.finish_checkpoint(folder, self.config.checkpoint.keep, scores)
        except Exception:
            self.directory.drop_unfinished(name)
            raise
        self._saved = step

    def _begin_checkpoint(self, name: str) -> Path:
        weights = kept_weights(self.learner.weights(), keep=self.is_main)
        return self.directory.begin_checkpoint(name, self.model, weights, self.tokenizer, self.learner.policy)

    def _state(self, step: int) -> RunState:
        return RunState(
            step=step,
            num_optimizer_steps=self.learner.num_optimizer_steps,
            next_problem=self.source.next_problem,
            num_nonfinite=self.learner.num_nonfinite,
            scheduler=self.learner.scheduler.state_dict(),
            ahead=self.source.sampled_ahead(),
            alarms=self.monitor.alarms.state(),
            data=self.data,
            seconds=self.seconds,
            run=self.directory.identity,
            periodic=self.is_due(step, self.config.checkpoint.every),
        )

    def complete(self, step: int) -> None:
        """Count a step as done, after which the run can be saved."""
        self.done, self._is_clean = step, True

    def leave(self, step: int) -> None:
        """End what the run started; if a step was not completed, save what there is.

        A step that has not learned anything leaves the run as the step before did, and that can be resumed. Weights from
        within a step cannot be: they are saved as ``stopped-step-...``, for a look at what went wrong.
        """
        # with ZeRO a checkpoint takes all processes, and who knows where the others are
        if step > max(self.done, 0) and not is_shared(self.accelerator):
            try:
                if not self._is_clean:
                    self._save_stopped(step)
                elif self._saved != self.done:
                    self.save(self.done)
            except (OSError, SafetensorError, UserError) as error:
                logger.warning("the weights of step %d could not be saved: %s", step, why_not_written(error) or error)
        self.source.close()

    def _save_stopped(self, step: int) -> None:
        name = f"stopped-step-{step:06d}"
        try:
            self.directory.finish_stopped(self._begin_checkpoint(name), step)
        except Exception:
            self.directory.drop_unfinished(name)
            raise

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Write a step's metrics down."""
        metrics["time/clock"] = time.time()
        self.metrics.append(metrics)
        self.directory.log(step, metrics)

    def draw(self, step: int, *, wanted: bool) -> None:
        """Keep a picture of the clip fraction by length."""
        figure = self.monitor.figure(step) if wanted else None
        if figure is not None:
            self.directory.save_figure(figure, f"clip_by_length/step-{step:06d}.png")
            del figure
            gc.collect()  # two megabytes that refer to themselves, and would wait long for their turn

    def evaluate(self) -> dict[str, float]:
        """Metrics on the held-out problems."""
        return self.source.evaluate(self._give_weights())

    @property
    def seconds(self) -> float:
        """What the run has taken so far, also before it was stopped and went on."""
        return self._before + time.perf_counter() - self._began

    def is_any(self, flag: bool) -> bool:
        """Whether it is true in any process."""
        return self.learner.passes.any(flag)

    def is_due(self, step: int, every: int) -> bool:
        """Whether this step is one of every so many; 0 for none."""
        return every > 0 and step > 0 and step % every == 0

    @property
    def how_to_resume(self) -> str:
        """The command that goes on with it."""
        return f"rlzoo train --resume --output {shlex.quote(str(self.directory.path))}"


def _num_bytes(model: nn.Module) -> int:
    """Bytes of the weights that are trained."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)
