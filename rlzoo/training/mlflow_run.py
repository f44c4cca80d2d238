"""The parameters and tags that are logged to MLflow for each run."""

from __future__ import annotations

from rlzoo.config.run_config import RunConfig
from rlzoo.gate.fingerprint import TRAIN_PROBLEMS
from rlzoo.journal.tracking.description import NOTE, describe_run
from rlzoo.journal.tracking.uploads import Upload, git_commit
from rlzoo.measure.colours import RULE_TAG
from rlzoo.support.distribution import version
from rlzoo.training.run import Run

SHOWN_DIGEST = 12  # number of characters; enough to distinguish data sets, but short enough for MLflow's table of runs


def upload_of(run: Run) -> Upload:
    """Build the MLflow record of a run, with its tags, parameters and files."""
    config, path, settings = run.config, run.directory.path, run.config.tracking
    title = f"**{config.clip.name}** on {config.task.name}, model {config.model.path}, seed {config.seed}, {config.steps} steps"
    return Upload.new(
        settings.experiment,
        path.absolute().name,
        tags={**run_tags(run), NOTE: describe_run(title, path.resolve())},
        params=config.model_dump(mode="json"),
        files=("config.yaml", "metrics.jsonl"),
    )


def run_tags(run: Run) -> dict[str, str]:
    """Return the MLflow tags of a run."""
    config = run.config
    return {
        RULE_TAG: config.clip.name,
        "clip_source": clip_source(config),
        "seed": str(config.seed),
        "task": run.task.name,
        "questions": run.facts[TRAIN_PROBLEMS][:SHOWN_DIGEST],
        "model": config.model.path,
        "git_commit": git_commit(),
        "rlzoo_version": version(),
    }


def clip_source(config: RunConfig) -> str:
    """Return the distribution (with its version) or the file that provides the rule, or else the rule's module."""
    entry = config.plugins.zoo.entries.get(config.clip.name)
    kind = type(config.clip)
    return entry.source if entry is not None and entry.kind is kind else kind.__module__
