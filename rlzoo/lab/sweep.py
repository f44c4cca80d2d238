"""A sweep: the same run for several policies and seeds, each a run of its own, nested under one MLflow run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.lab.run_records import changed_settings, read_mapping
from rlzoo.support.parsing import parse_json, parse_yaml
from rlzoo.support.reading import RECORDS, read_text


@dataclass(frozen=True, slots=True)
class Child:
    """One run of a sweep.

    Example:
        ``Child("mine-0", config, ("--clip", "mine", "--seed", "0"))``
    """

    name: str
    config: RunConfig
    arguments: tuple[str, ...]  # of `rlzoo train`

    @property
    def path(self) -> Path:
        """Its run directory."""
        assert self.config.output is not None, "a child's output is set when the sweep is planned"
        return self.config.output

    @property
    def is_finished(self) -> bool:
        """Whether it has reached its last step."""
        return bool(read_mapping(self.path / "summary.json").get("finished"))

    @property
    def is_begun(self) -> bool:
        """Whether there is a run to resume."""
        return (self.path / "config.yaml").is_file()

    def last_metrics(self) -> dict[str, float]:
        """The last line of its metrics; empty before the first, and while a line is being written."""
        try:
            lines = read_text(self.path / "metrics.jsonl", RECORDS).splitlines()
            return dict(parse_json(lines[-1])) if lines else {}
        except (OSError, ValueError, TypeError):
            return {}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Policies x settings x seeds, in one folder.

    Example:
        ``Sweep(Path("sweeps/race"), clips=("mine", "yours"), seeds=(0, 1, 2))`` has six children.
    """

    folder: Path
    clips: tuple[str, ...]
    seeds: tuple[int, ...]
    configs: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    grid: tuple[str, ...] = ()  # "learner.lr=1e-4,3e-4": every value with every policy and seed
    plugins: tuple[str, ...] = ()
    steps: int | None = None
    children: tuple[Child, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Compose every child, so that a mistake in any of them is told before the first starts.

        Raises:
            UserError: a setting is wrong, or a finished run in the folder is not the one that is asked for.
        """
        object.__setattr__(self, "children", tuple(self._children()))
        for child in self.children:
            _check_same(child)

    def _children(self) -> Iterator[Child]:
        for seed, clip, setting in itertools.product(self.seeds, self.clips, _grid(self.grid)):
            words = [clip, *(f"{key.rpartition('.')[2]}={value}" for key, value in setting.items()), str(seed)]
            name = "-".join(words).replace("/", "_")  # one folder, whatever stands in a setting
            path = self.folder / name
            overrides = (*self.overrides, *(f"{key}={value}" for key, value in setting.items()))
            config = RunConfig.compose(
                self.configs, clip=clip, overrides=overrides, plugins=self.plugins, seed=seed, steps=self.steps, output=path
            )
            arguments = ["--clip", clip, "--seed", str(seed), "--output", str(path)]
            for option, values in (("--config", self.configs), ("--set", overrides), ("--plugin", self.plugins)):
                arguments += [word for value in values for word in (option, value)]
            arguments += [] if self.steps is None else ["--steps", str(self.steps)]
            yield Child(name, config, tuple(arguments))

    @property
    def total_steps(self) -> int:
        """Steps of all children together."""
        return sum(child.config.steps for child in self.children)


def parse_seeds(text: str) -> tuple[int, ...]:
    """``"5"`` is seeds 0 to 4, ``"101,102"`` those two, ``"5,"`` seed 5 alone.

    Raises:
        UserError: it is neither.
    """
    try:
        seeds = tuple(range(int(text))) if "," not in text else tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        seeds = ()
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text!r}: give a number of seeds, such as 5 for 0 to 4, or different seeds, such as 101,102")
    return seeds


def _grid(axes: Sequence[str]) -> list[dict[str, str]]:
    """Every combination of the axes' values; one empty one without axes."""
    keys, choices = [], []
    for axis in axes:
        key, equals, values = axis.partition("=")
        words = [word.strip() for word in values.split(",") if word.strip()]
        if not equals or not key or not words:
            raise UserError(f"--grid {axis!r}: write KEY=VALUE,VALUE such as learner.lr=1e-4,3e-4")
        keys.append(key)
        choices.append(words)
    return [dict(zip(keys, words, strict=True)) for words in itertools.product(*choices)]


def _check_same(child: Child) -> None:
    """Refuse a run in the child's directory that has other settings."""
    if not child.is_begun:
        return
    before = read_mapping(child.path / "config.yaml", parse_yaml)
    if not before:
        raise UserError(f"{str(child.path)!r} is a run whose config.yaml cannot be read; remove it")
    asked = yaml.safe_load(child.config.to_yaml())
    if changed := changed_settings(before, asked | {"output": before.get("output")}):
        raise UserError(
            f"{str(child.path)!r} is a run with another {', '.join(changed[:3])}; choose another --output, or remove it"
        )
