"""Formats the results of `rlzoo race` for the documentation: tables in Markdown, and a figure for each track."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean

from rlzoo.lab.results import CLONE, Result, Standings
from rlzoo.lab.track import Track
from rlzoo.measure.figures import forest, svg
from rlzoo.measure.intervals import Interval

BLOCKS = "▁▂▃▄▅▆▇█"
NUM_BLOCKS = 20
VERSIONS = ("version of rlzoo-llm", "version of torch", "version of transformers")


def standings(track: str) -> Standings:
    """Return the shipped results on a track."""
    return Standings.of(Track.read(track), [CLONE])


def race(track: str) -> str:
    """Return what the results on a track show, the table of scores, and a table of settings and learning curves."""
    table = standings(track)
    if not table.results:
        return "There are no results on this track yet."
    control = table.track.reference
    lines = [" ".join(table.sentences()), ""]
    columns = f"rule | reward | minus {control} [simultaneous 95%] | solved | below start | collapsed | best lr | loss beside"
    columns += " | clipped | length error [95%] | entropy | length | tokens | time"
    lines += [f"| {columns} |", "|---" * (columns.count("|") + 1) + "|"]
    lines += [_scores(table, result) for result in table.results]
    lines += [
        "",
        "| rule | settings | learning rate: mean reward of the tuning runs | reward by step | result |",
        "|---" * 5 + "|",
    ]
    lines += [_settings(table, result) for result in table.results]
    made = sorted({result.date for result in table.results})
    versions = sorted({", ".join(f"{name[11:]} {result.facts[name]}" for name in VERSIONS) for result in table.results})
    machines = ", ".join(sorted({result.processor for result in table.results}))
    return "\n".join([*lines, "", f"Made from {made[0]} to {made[-1]} on {machines} with {'; '.join(versions)}."])


def picture(track: str) -> str:
    """Draw each rule's difference from the reference rule, with simultaneous intervals."""
    table = standings(track)
    rows = [(rule, pair.mean or 0.0, pair.interval) for rule, pair in table.pairs.items()]
    return svg(forest(rows, xlabel=f"mean reward minus that of {table.track.reference}, simultaneous 95% intervals")) + "\n"


def _scores(table: Standings, result: Result) -> str:
    one, pair = result.summary(), table.pairs.get(result.rule)
    gap = f"{_number(pair.mean, '+.3f')} {_interval(pair.interval)}" if pair else ""
    edge = " (edge)" if one["at_edge"] else ""
    error = f"{_number(result.evenness.length_error)} {_interval(result.evenness.interval)}"
    cells = [
        f"`{result.rule}`",
        _number(one["reward"], ".4f"),
        gap,
        _number(one["solved"]),
        one["below_start"],
        one["collapsed"],
    ]
    cells += [f"{one['learning_rate']:g}{edge}", _number(one["loss_beside"]), _number(one["clip_fraction"]), error]
    cells += [
        _number(one["entropy"]),
        _number(one["length"], ".1f"),
        f"{one['tokens']:,}",
        _number(one["relative_step_time"], ".2f"),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def _settings(table: Standings, result: Result) -> str:
    settings = {name: value for name, value in result.widths.get("clip", {}).items() if name != "name"}
    rates = sorted({record.learning_rate for record in result.tuning})
    means = [fmean(record.score for record in result.tuning if record.learning_rate == rate) for rate in rates]
    tried = ", ".join(f"{rate:g}: {mean:.3f}" for rate, mean in zip(rates, means, strict=True))
    words = ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in settings.items()
    )
    link = f"[json](../results/{table.track.name}/{result.rule}.json)"
    return f"| `{result.rule}` | {words or 'as published'} | {tried} | {_curve(result)} | {link} |"


def _curve(result: Result) -> str:
    """Return the mean reward over the steps as a line of blocks, from 0 to 1."""
    curves = [record.curve for record in result.runs if not record.failure]
    if not curves:
        return ""
    ends = [round(len(curves[0]) * place / NUM_BLOCKS) for place in range(NUM_BLOCKS + 1)]
    means = [fmean(value for curve in curves for value in curve[first:last]) for first, last in pairwise(ends) if last > first]
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int(max(0.0, mean) * len(BLOCKS)))] for mean in means)


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def _interval(ends: Interval | None) -> str:
    return "" if ends is None else f"[{ends[0]:.3f}, {ends[1]:.3f}]"


def pictures(folder: Path) -> dict[Path, str]:
    """Return the figures of all tracks that have results of two rules, by file."""
    tracks = sorted({file.parent.name for file in CLONE.glob("*/*.json")})
    return {folder / f"race-{track}.svg": picture(track) for track in tracks if standings(track).pairs}
