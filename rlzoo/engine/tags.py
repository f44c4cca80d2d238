"""What MLflow is told of a run, and what runs are told apart by there."""

from __future__ import annotations

from importlib.metadata import version

from rlzoo.config import RunConfig
from rlzoo.tracking.record import Record, git_commit
from rlzoo.zoo import load_zoo


def run_record(config: RunConfig, task: str, name: str) -> Record:
    """What MLflow is told of a run by this name."""
    return Record.new(
        config.tracking.experiment,
        name,
        tags=run_tags(config, task),
        params=config.model_dump(mode="json"),
        files=("config.yaml", "metrics.jsonl"),
        completions=config.tracking.completions,
    )


def run_tags(config: RunConfig, task: str) -> dict[str, str]:
    """MLflow's tags of a run."""
    return {
        "clip": config.clip.name,
        "clip_source": clip_source(config),
        "seed": str(config.seed),
        "task": task,
        "model": config.model.path,
        "git_commit": git_commit(),
        "rlzoo_version": version("rlzoo"),
    }


def clip_source(config: RunConfig) -> str:
    """Distribution and version, or file, that the policy comes from; its module for one made in Python."""
    entry = load_zoo(config.plugins).entries.get(config.clip.name)
    kind = type(config.clip)
    return entry.source if entry is not None and entry.policy is kind else kind.__module__
