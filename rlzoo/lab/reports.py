"""Renders HTML pages for comparisons of runs and for replay studies."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlzoo.lab.compare import ComparedRule, Comparison
from rlzoo.lab.study import Study
from rlzoo.measure.comparison import TEST
from rlzoo.measure.figures import Series, forest, lines, plot_by_length
from rlzoo.measure.profile import LengthProfile
from rlzoo.measure.report import ReportSection, Table, render

SMOOTHED = 5  # number of steps over which a curve is averaged
PARTS = (
    "`lre_max` is conditional on the sign of the advantage: every length bin is reweighted to the overall mix of signs. `by "
    "signs` is the error that the mix of signs alone would cause, if each sign were clipped equally at every length. `total` "
    "is the error without this reweighting. Compare errors only at the same clip fraction. `clipped` is the share of all "
    "responses of a run, whereas `clip fraction` is a mean over its steps."
)


def comparison_report(comparison: Comparison) -> str:
    """Render the page of a comparison."""
    settings = [run.settings for rule in comparison.rules for run in rule.runs]
    facts = {"runs": f"{len(settings)}, of {len(comparison.rules)} rules", "score": comparison.score}
    for name in ("task.name", "model.path", "steps"):
        facts[name.partition(".")[0]] = ", ".join(dict.fromkeys(str(one.get(name)) for one in settings))
    scores, pairs, errors, *others = comparison.tables()
    sections = [_scores(comparison, scores), _curves(comparison)]
    sections += [_fairness(comparison, errors)] if errors.rows else []
    sections += [_pairs(pairs)] if pairs.rows else []
    text = "Runs that share a machine slow each other down."
    return render("Comparison of runs", facts, [*sections, ReportSection("Time, memory and runs", [text], (), others)])


def _scores(comparison: Comparison, table: Table) -> ReportSection:
    dots = [(rule.label, rule.score.iqm, rule.score.iqm_interval) for rule in comparison.rules]
    text = (
        "The 95% intervals are over seeds. The mean has a Student's t interval; IQM, the interquartile mean (arXiv "
        f"2108.13264), has the interval of a trimmed mean. Gain is the final {comparison.scored} minus the "
        f"{comparison.scored} before the first update."
    )
    figures = [forest(dots, xlabel=f"{comparison.score} (IQM)")] if any(interval for *_, interval in dots) else []
    return ReportSection("Scores", [*comparison.highlights, *comparison.notes, text], figures, [table])


def _pairs(table: Table) -> ReportSection:
    text = (
        f"Differences are paired by seed: both runs have the same problems and the same initial model. Each 95% interval "
        f"is for a single pair, without correction. {TEST}"
    )
    return ReportSection("Pairs", [text], (), [table])


def _curves(comparison: Comparison) -> ReportSection:
    held_out = f"held-out {comparison.scored}"
    labels = {"eval/accuracy": held_out, "reward/mean": "mean reward", "clip/fraction": "clip fraction"}
    labels["response/length_mean"] = "mean response length in tokens"
    curves = {label: {rule.label: _curve(rule, name) for rule in comparison.rules} for name, label in labels.items()}
    figures = [lines(of, xlabel="step", ylabel=label) for label, of in curves.items() if all(one.x for one in of.values())]
    text = (
        f"Lines are means over seeds and, except for the {held_out}, over {SMOOTHED} steps; dots are single steps. "
        "If there are few rules, bands range from the lowest to the highest value of any seed."
    )
    return ReportSection("By step", [text], figures)


def _curve(rule: ComparedRule, name: str) -> Series:
    """Return, for each step, the mean over seeds and the mean, minimum and maximum of the seeds' running means."""
    by_seed = [{row["step"]: row[name] for row in run.metrics if name in row} for run in rule.runs]
    steps = sorted(set.intersection(*map(set, by_seed)))
    values, window = np.array([[row[step] for step in steps] for row in by_seed]), 1 if name == "eval/accuracy" else SMOOTHED
    smooth = np.array([values[:, max(0, end - window) : end].mean(1) for end in range(1, len(steps) + 1)]).T
    if not steps:
        return Series((), ())
    return Series(steps, smooth.mean(0).tolist(), smooth.min(0).tolist(), smooth.max(0).tolist(), values.mean(0).tolist())


def _fairness(comparison: Comparison, table: Table) -> ReportSection:
    profiles = {rule.label: rule.profile for rule in comparison.rules if rule.profile}
    signs = " for each sign of the advantage" if comparison.by_sign else ""
    text = "`clip fraction`, `lre_max` and `ess` are measured at the widths used in training and pooled over seeds."
    if comparison.match is not None:
        matched = f"with widths scaled to a clip fraction of {comparison.match}{signs}"
        text += f" The other columns summarize the runs, each replayed {matched}."
    figure = plot_by_length(_clip_fractions(profiles, "both"))
    return ReportSection("By response length", [f"{text} {PARTS}"], [figure], [table])


def study_report(study: Study) -> str:
    """Render the page of a replay study."""
    run = study.run
    facts = {
        "run": str(run.path),
        "trained with": run.trained_with,
        **({"task": run.config.task.name} if run.config else {}),
        "model": run.model or "not recorded",
        "responses": str(run.num_responses),
        "clip fraction": "as configured" if study.match is None else f"matched at {study.goal}",
        "steps excluded": str(study.skip_steps),
    }
    return render(f"Replay of {run.path.name}", facts, [_summary(study), _by_length(study)])


def _summary(study: Study) -> ReportSection:
    paragraphs = [
        "Every rule was applied to the same recorded log-probs, update by update. `lre_max` is the largest relative error of "
        f"the weight that remains in a length bin after clipping. {PARTS} `noise` is the expected `lre_max` with this number "
        "of prompts if every length were clipped equally, and `corrected` is `lre_max` without the contribution of noise. The "
        "interval comes from the variation between prompts, each with all its responses and epochs.",
        *study.notes,
    ]
    return ReportSection("What each rule clips", paragraphs, (), list(study.tables()))


def _by_length(study: Study) -> ReportSection:
    profiles = {rule.label: rule.profile for rule in study.rules}
    figures = [
        plot_by_length(_clip_fractions(profiles, side), title=title)
        for side, title in (("both", "all responses"), ("below", "A < 0"), ("above", "A > 0"))
    ]
    for name, ylabel in (("gradient_mass", "share of gradient mass"), ("ess_by_length", "effective sample size")):
        series = {label: Series(profile.median_length, getattr(profile, name)) for label, profile in profiles.items()}
        figures.append(plot_by_length(series, ylabel=ylabel))
    text = (
        "Responses are grouped into six quantile bins of length. Error bars are 95% intervals over prompts. Gradient mass is "
        "the sum of |dJ/dlog_probs| over tokens."
    )
    return ReportSection("By response length", [text], figures)


def _clip_fractions(profiles: Mapping[str, LengthProfile], side: str) -> dict[str, Series]:
    """Return clip fractions by length. ``side`` is ``"both"``, ``"below"`` or ``"above"``."""
    sides = {label: (profile.median_length, getattr(profile, side)) for label, profile in profiles.items()}
    return {label: Series(x, shares.fraction, shares.low, shares.high) for label, (x, shares) in sides.items()}
