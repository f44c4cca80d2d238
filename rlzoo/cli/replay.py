"""`rlzoo replay`: other rules on a run's recorded rollouts, as tables, JSON and an HTML report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from rlzoo.cli.display import Plain, counted
from rlzoo.cli.pages import check_page, write_page
from rlzoo.cli.tables import interval, number
from rlzoo.config.run_config import RunConfig
from rlzoo.errors import UserError
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import widths_of
from rlzoo.lab.study import Study, study
from rlzoo.policy import ClipPolicy


def run_replay(
    *,
    path: Path,
    clips: str,
    configs: Sequence[str],
    overrides: Sequence[str],
    plugins: Sequence[str],
    match: float | None,
    sweep_width: bool,
    skip_steps: int,
    with_cosine: bool,
    as_json: bool,
    report: Path | None,
    is_quiet: bool = False,
) -> None:
    """Replay, and show what came of it."""
    run = RecordedRun.read(path)
    page = report or path / "replay.html"
    if report is not None or not as_json:
        check_page(page)
    names = dict.fromkeys(name.strip() for name in clips.split(",") if name.strip())
    if not names:
        raise UserError(f"--clip {clips!r}: give policies with commas between them; see `rlzoo clips list`")
    policies = [_policy(run, name, configs, overrides, plugins) for name in names]
    console = Plain()
    with counted(is_quiet=is_quiet) as told:
        result = study(
            run,
            policies,
            match=match,
            skip_steps=skip_steps,
            sweep_width=sweep_width,
            with_cosine=with_cosine,
            told=told,
        )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        _print(console, result, with_cosine)
    if report is not None or not as_json:
        from rlzoo.lab.reports import study_report

        write_page(page, study_report(result))
        if not is_quiet:
            Plain(stderr=as_json).print(f"report {page}")


def _policy(
    run: RecordedRun, name: str, configs: Sequence[str], overrides: Sequence[str], plugins: Sequence[str]
) -> ClipPolicy:
    """The run's own policy as it was configured; another as `rlzoo train` with these configs would set it."""
    if name == run.config.clip.name and not configs and not overrides:
        return run.config.clip
    config = RunConfig.compose(configs, clip=name, overrides=overrides, plugins=[*run.config.plugins, *plugins])
    return config.clip


def _print(console: Plain, result: Study, with_cosine: bool) -> None:
    run = result.run
    matched = f", each at a clip fraction of {result.match}" if result.match else ""
    steps = f", after step {result.skip_steps}" if result.skip_steps else ""
    console.print(f"{run.num_responses} responses to update on in {run.path}{steps}{matched}")
    table = Table(box=None, pad_edge=False)
    for column in ("policy", "clipped", "A < 0", "A > 0", "lre_max", "95 %", "noise", "ess", "cosine"):
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for rule in result.rules:
        profile = rule.replayed.profile
        rows = rule.replayed.table.judged()
        below, above = (rows.clipped[rows.advantage * sign > 0] for sign in (-1, 1))
        numbers = (profile.clip_fraction, float(below.mean()), float(above.mean()), profile.lre_max)
        cosine = rule.cosine.mean if rule.cosine else None
        table.add_row(
            rule.label,
            *map(number, numbers),
            interval(profile.lre_max_interval),
            *map(number, (profile.lre_noise, profile.ess, cosine)),
        )
    console.print(table)
    by_length = Table(box=None, pad_edge=False, title="clip fraction by length in tokens", title_justify="left")
    labels = result.rules[0].replayed.profile.bin_labels()
    for column in ("policy", *labels):
        by_length.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for rule in result.rules:
        by_length.add_row(rule.label, *map(number, rule.replayed.profile.both.fraction))
    console.print(by_length)
    for rule in result.rules:
        widths = ", ".join(f"{name} {value:.4g}" for name, value in widths_of(rule.replayed.policy).items())
        console.print(f"{rule.label}: {rule.note or widths or 'no width'}")
    for label in result.sweep:
        console.print(_width_table(label, result))
    if with_cosine and result.rules[0].cosine is None:
        console.print("no cosine: the run kept no weights (train with --set checkpoint.keep_for_replay=10)")


def _width_table(label: str, result: Study) -> Table:
    table = Table(box=None, pad_edge=False, title=f"{label} by width", title_justify="left")
    for column in ("factor", "clip fraction", "lre_max", "noise", "ess", "cosine"):
        table.add_column(column, justify="right")
    for factor, rule in result.sweep[label].items():
        table.add_row(f"{factor:g}", *map(number, rule.measures.values()))
    return table
