"""The pieces of one run, and what one step does with them."""

from __future__ import annotations

import gc
import logging
import time
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path

from safetensors import SafetensorError

from rlzoo.config import RunConfig
from rlzoo.engine.collect import Batch
from rlzoo.engine.experience import Experience
from rlzoo.engine.learner import Learner, Update
from rlzoo.engine.metrics import is_spike, mean_version, policy_settings, rollout_metrics, update_metrics
from rlzoo.engine.mismatch import mismatch_metrics
from rlzoo.engine.monitor import WINDOW, Monitor
from rlzoo.engine.optimization import is_shared, is_spread, kept_weights
from rlzoo.engine.passes import gather
from rlzoo.engine.pretrained import eos_token_ids, load_named
from rlzoo.engine.processes import make_accelerator, peak_memory
from rlzoo.engine.rollout import Sampler
from rlzoo.engine.run_directory import RunDirectory
from rlzoo.engine.samplers import make_sampler
from rlzoo.engine.sampling import RolloutSource
from rlzoo.engine.seeds import LEARNER, step_seed
from rlzoo.engine.shaping import reward_metrics
from rlzoo.engine.state import RunState, newest_state
from rlzoo.engine.threads import Threads
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
        checkpoint = newest_state(path) if resume else None
        if self.is_main and not resume:
            RunDirectory.check_free(path)
        self.config = config.model_copy(update={"output": path})
        self.task = task
        self.model, self.tokenizer = load_named(config.model)
        # one batch ahead, sampling and learning go on at the same time and share torch's setting
        self.threads = Threads(self.model, is_on=config.rollout.max_staleness == 0)
        # before the learner's: ZeRO-3 takes the model apart, and an adapter changes its modules
        self.source = RolloutSource(config, task, self._make_sampler(), self.accelerator)
        self.learner = self._make_learner()
        self.monitor = Monitor(config.clip)
        self.metrics: list[dict[str, float]] = []
        self.done = 0  # steps
        self._began, self._before = time.perf_counter(), 0.0
        self._has_learned = False  # in the step under way
        self._given = -1  # optimizer steps of the weights the sampler has; not known before it was given any
        if not resume:
            self.directory = RunDirectory.create(path, self.config.to_yaml(), self.config.plugins, is_writer=self.is_main)
            return
        self.directory = RunDirectory(path, is_writer=self.is_main)
        with ExitStack() as failed:
            failed.callback(self.directory.close)
            self._restore(checkpoint)
            failed.pop_all()

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
        """Stand where a checkpoint was written, or at the beginning if there is none."""
        if folder is None:
            logger.warning("no checkpoint yet in %s: beginning again with step 0", self.directory.path)
            self.directory.cut_after(-1)
            return
        state = RunState.read(folder)
        if state.data != self.data:
            raise UserError(
                f"--resume: the training problems of task {self.task.name!r} are not those the run was started with; "
                "put its data back as it was, or start another run"
            )
        self.learner.load(folder, state.num_optimizer_steps, state.scheduler)
        self.learner.num_nonfinite = state.num_nonfinite
        self.source.restore(state.next_problem, state.ahead)
        self.monitor.restore(folder, state.alarms)
        self.done, self._before = state.step, state.seconds
        self.accelerator.wait_for_everyone()
        self.metrics = self.directory.cut_after(state.step)
        if self.source.sampler.needs_weights:
            self.source.sampler.update_weights(self.learner.weights())
        self._given = state.num_optimizer_steps

    def summary(self, *, finished: bool) -> dict[str, object]:
        """What ``summary.json`` says of it."""
        return {
            "finished": finished,
            "steps": self.config.steps,
            "peak_memory_bytes": peak_memory(),
            "warnings": self.monitor.alarms.raised,
        }

    def step(self, step: int) -> dict[str, float]:
        """One rollout batch and everything learned from it."""
        started = time.perf_counter()
        position, self._has_learned = self.source.position(), False
        try:
            batch = self._sample(step)
        except BaseException:
            self.source.go_back(position)
            raise
        groups = batch.groups
        sampled, sampled_at = time.perf_counter(), self.learner.num_optimizer_steps
        settings, limit = self.config.reward, self.config.rollout.max_new_tokens
        experience = Experience.from_groups(groups, self.learner.policy.advantage, settings, limit)
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
        self.monitor.after_step(step, [update.table for update in updates], metrics)
        if self.is_due(step, self.config.eval.every) or step == self.config.steps:
            metrics |= self.evaluate()
        return metrics

    def _learn(self, step: int, groups: list[RolloutGroup], experience: Experience) -> tuple[Experience, list[Update]]:
        """The optimizer steps of one batch; none if nothing can be learned from it."""
        if not bool((experience.advantages != 0).any()) and not self.learner.has_reference:
            return experience, []
        self._has_learned = True
        tokens = min(self.learner.passes.max_tokens, sum(experience.sizes) / self.config.learner.num_minibatches)
        keep = self.is_due(step, self.config.checkpoint.keep_for_replay)
        before = partial(self._keep_weights, step) if keep else None
        try:
            with self.threads.learning(tokens):
                return self.learner.update(experience, step_seed(self.config.seed, LEARNER, step), before)
        except (PolicyError, RunError):
            self.directory.record_rollouts(step, groups, experience, [])  # the data it stumbled over
            raise

    def _roll_back(self, step: int) -> bool:
        """Take the newest checkpoint's weights, and go on with other data; False if there is none yet."""
        folder = newest_state(self.directory.path)
        if folder is None:
            logger.warning("step %d: a spike of the gradient, and no checkpoint to roll back to", step)
            return False
        state = RunState.read(folder)
        self.learner.load(folder, state.num_optimizer_steps, state.scheduler)
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
        """One step's batch, by the newest weights, or by those of one step before while the next is sampled already."""
        if not self.config.rollout.max_staleness:
            return self.source.take(step, self._give_weights())
        batch = self.source.take(step, self._given)
        version = self._give_weights()
        if step < self.config.steps:
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
        """Save the model, the policy's state beside it, and, if the step is complete, what it takes to go on from it."""
        name, policy = f"step-{step:06d}", self.learner.policy
        weights = kept_weights(self.learner.weights(), keep=self.is_main)
        folder = self.directory.begin_checkpoint(name, self.model, weights, self.tokenizer, policy)
        if step == self.done:
            self.accelerator.wait_for_everyone()
            self.learner.save(folder / "state")
            state = RunState(
                step=step,
                num_optimizer_steps=self.learner.num_optimizer_steps,
                next_problem=self.source.next_problem,
                num_nonfinite=self.learner.num_nonfinite,
                scheduler=self.learner.scheduler.state_dict(),
                ahead=self.source.sampled_ahead(),
                alarms=self.monitor.alarms.state(),
                data=self.data,
                seconds=self.seconds,
            )
            if self.is_main:
                state.write(folder / "state")
                self.monitor.save(folder / "state")
            self.accelerator.wait_for_everyone()
        scores = {at: row["eval/accuracy"] for at, row in enumerate(self.metrics) if "eval/accuracy" in row}
        self.directory.finish_checkpoint(folder, self.config.checkpoint.keep, scores)

    def leave(self, step: int) -> None:
        """End what the run started; if a step was not completed, save what it came to.

        A step that has not learned anything leaves the run where the step before did, from where it can go on.
        """
        # with ZeRO a checkpoint takes all processes, and who knows where the others are
        if step > max(self.done, 0) and not is_shared(self.accelerator):
            try:
                self.save(step if self._has_learned else self.done)
            except (OSError, SafetensorError) as error:
                logger.warning("the weights of step %d could not be saved: %s", step, error)
        self.source.close()

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
        return f"rlzoo train --resume --output {self.directory.path}"
