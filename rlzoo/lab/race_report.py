"""A race as one HTML page."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from rlzoo.journal.tracking.record import run_id_of
from rlzoo.lab.races import SCORES, Contender, Race
from rlzoo.measure.figures import Series, forest, lines, profile
from rlzoo.measure.report import Cell, ReportSection, Table, render

MEGABYTE = 2**20


def race_report(race: Race) -> str:
    """The page, complete in itself."""
    facts = {
        "policies": str(len(race.contenders)),
        "runs": str(sum(len(contender.runs) for contender in race.contenders)),
        "score": SCORES[race.metric],
    }
    sections = [_scores(race), _pairs(race), _curves(race)]
    if any(contender.profile for contender in race.contenders):
        sections.append(_fairness(race))
    return render("Comparison of runs", facts, [*sections, _costs(race)])


def _scores(race: Race) -> ReportSection:
    rows: list[list[Cell]] = []
    for contender in race.contenders:
        score = contender.score
        low, high = score.iqm_interval or (None, None)
        clipped, length = contender.mean("clip/fraction"), contender.mean("response/length_mean", 0.25)
        rows.append([contender.label, score.num_seeds, score.mean, contender.gain, score.iqm, low, high, clipped, length])
    columns = ["policy", "seeds", "mean", "gain", "IQM", "95 % from", "to", "clip fraction", "response length"]
    dots = [(c.label, c.score.iqm, *(c.score.iqm_interval or (None, None))) for c in race.contenders]
    text = (
        "IQM is the interquartile mean over seeds with its bootstrap interval (arXiv 2108.13264). With five seeds such an "
        "interval holds the true value about nine times out of ten, not 19 out of 20. Gain: accuracy at the end less accuracy "
        "before the first update."
    )
    return ReportSection(
        "Scores", [*race.notes, text], [forest(dots, xlabel=SCORES[race.metric])], [Table(SCORES[race.metric], columns, rows)]
    )


def _pairs(race: Race) -> ReportSection:
    rows: list[list[Cell]] = []
    for pair in race.pairs:
        low, high = pair.interval or (None, None)
        better = (pair.probability_of_improvement, *(pair.probability_interval or (None, None)))
        rows.append(
            [pair.first, pair.second, pair.num_seeds, pair.mean, low, high, *better, pair.adjusted_p_value, pair.verdict]
        )
    better_columns = ["P(first > second)", "95 % from", "to"]
    columns = ["first", "second", "seeds", "difference", "95 % from", "to", *better_columns, "p, Holm", "verdict"]
    text = (
        "Differences are paired by seed: the same problems, the same model to begin with. A winner is named where the paired "
        "interval leaves 0 out and the exact sign-flip test stays below .1 after Holm's correction over all pairs."
    )
    return ReportSection("Pairs", [text], (), [Table("Every pair", columns, rows)])


def _curves(race: Race) -> ReportSection:
    figures = [
        lines({c.label: _curve(c, name) for c in race.contenders}, xlabel="step", ylabel=label)
        for name, label in (("reward/mean", "mean reward"), ("response/length_mean", "mean response length in tokens"))
    ]
    return ReportSection("By step", ["Mean over seeds, between the lowest and the highest."], figures)


def _curve(contender: Contender, name: str) -> Series:
    """Mean, lowest and highest over seeds, each the mean of the last five steps."""
    by_seed = [[row[name] for row in run.metrics if name in row] for run in contender.runs]
    length = min(map(len, by_seed))
    values = np.array([row[:length] for row in by_seed])
    smooth = np.array([values[:, max(0, step - 5) : step].mean(1) for step in range(1, length + 1)])
    return Series(range(1, length + 1), smooth.mean(1).tolist(), smooth.min(1).tolist(), smooth.max(1).tolist())


def _fairness(race: Race) -> ReportSection:
    known = [(contender, contender.profile) for contender in race.contenders if contender.profile]
    series = {c.label: Series(found.median_length, found.both.fraction, found.both.low, found.both.high) for c, found in known}
    rows: list[list[Cell]] = []
    for contender, found in known:
        errors = [matched.lre_max for matched in contender.matched if matched.lre_max is not None]
        noise = [matched.lre_noise for matched in contender.matched if matched.lre_noise is not None]
        at_match: list[Cell] = [fmean(errors), min(errors), max(errors), fmean(noise)] if errors and noise else [None] * 4
        rows.append([contender.label, found.clip_fraction, found.lre_max, *at_match, found.ess])
    columns = ["policy", "clip fraction", "lre_max", "lre_max, matched", "lowest", "highest", "noise", "ess"]
    matched = "as they were" if race.match is None else f"replayed with widths scaled to a clip fraction of {race.match}"
    text = f"As trained, pooled over seeds; and each run {matched}. Compare `lre_max` only at the same clip fraction."
    return ReportSection("By response length", [text], [profile(series)], [Table("Length fairness", columns, rows)])


def _costs(race: Race) -> ReportSection:
    rows: list[list[Cell]] = []
    for contender in race.contenders:
        seconds = fmean(run.seconds for run in contender.runs)
        memory = [run.summary["peak_memory_bytes"] / MEGABYTE for run in contender.runs if run.summary.get("peak_memory_bytes")]
        speed, limited = contender.mean("throughput/tokens_per_second"), contender.mean("learner/grad_clipped")
        rows.append([contender.label, seconds, speed, fmean(memory) if memory else None, limited])
    columns = ["policy", "seconds", "tokens/s", "peak memory, MiB", "updates with norm clipping"]
    ids: list[list[Cell]] = [
        [contender.label, run.seed, str(run.path), run_id_of(run.path) or ""]
        for contender in race.contenders
        for run in contender.runs
    ]
    tables = [Table("Means over runs", columns, rows), Table("The runs", ["policy", "seed", "folder", "MLflow run"], ids)]
    return ReportSection("Time, memory and runs", ["Runs side by side on one machine slow each other down."], (), tables)
