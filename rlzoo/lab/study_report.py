"""A replay study as one HTML page."""

from __future__ import annotations

from rlzoo.lab.replay import widths_of
from rlzoo.lab.study import Study
from rlzoo.measure.figures import Series, lines, profile
from rlzoo.measure.profile import QUANTILES
from rlzoo.measure.report import Cell, ReportSection, Table, render


def study_report(study: Study) -> str:
    """The page, complete in itself."""
    run = study.run
    facts = {
        "run": str(run.path),
        "trained with": run.config.clip.name,
        "task": run.config.task.name,
        "model": run.config.model.path,
        "responses": str(run.num_responses),
        "clip fraction": "as configured" if study.match is None else f"matched at {study.match}",
        "steps left out": str(study.skip_steps),
    }
    sections = [_summary(study), _by_length(study)]
    if any(rule.cosine for rule in study.rules):
        sections.append(_cosine(study))
    if study.sweep:
        sections.append(_widths(study))
    return render(f"Replay of {run.path.name}", facts, [*sections, _shape(study)])


def _summary(study: Study) -> ReportSection:
    rows: list[list[Cell]] = []
    for rule in study.rules:
        found = rule.replayed.profile
        low, high = found.lre_max_interval or (None, None)
        mean = rule.cosine.mean if rule.cosine else None
        widths = ", ".join(f"{name} {value:.4g}" for name, value in widths_of(rule.replayed.policy).items())
        lre = (found.lre_max, found.lre_max_corrected, low, high, found.lre_mean, found.lre_noise)
        rows.append([rule.label, found.clip_fraction, *lre, found.ess, mean, widths])
    lre_columns = ["lre_max", "corrected", "95 % from", "to", "lre_mean", "noise"]
    columns = ["policy", "clip fraction", *lre_columns, "ess", "cosine", "widths"]
    paragraphs = [
        "Every rule judged the same recorded log-probs, update by update. `lre_max` is the largest relative error of the "
        "weight that clipping leaves to a length bin; compare it only at the same clip fraction. `noise` is the `lre_max` to "
        "expect of so many prompts if every length were clipped alike, and `corrected` is `lre_max` without what noise "
        "adds. The interval draws prompts with all their responses and epochs.",
        *(f"{rule.label}: {rule.note}" for rule in study.rules if rule.note),
    ]
    return ReportSection("What each rule clips", paragraphs, (), (Table("All responses with an advantage", columns, rows),))


def _by_length(study: Study) -> ReportSection:
    profiles = {rule.label: rule.replayed.profile for rule in study.rules}
    figures = []
    for side, title in (("both", "all responses"), ("below", "A < 0"), ("above", "A > 0")):
        fractions = {label: (found.median_length, getattr(found, side)) for label, found in profiles.items()}
        series = {label: Series(x, side.fraction, side.low, side.high) for label, (x, side) in fractions.items()}
        figures.append(profile(series, title=title))
    for name, ylabel in (("gradient_mass", "share of gradient mass"), ("ess_by_length", "effective sample size")):
        series = {label: Series(found.median_length, getattr(found, name)) for label, found in profiles.items()}
        figures.append(profile(series, ylabel=ylabel))
    columns = ["policy", *study.rules[0].replayed.profile.bin_labels()]
    rows: list[list[Cell]] = [[label, *found.both.fraction] for label, found in profiles.items()]
    text = (
        "Six quantile bins of length; bars are 95 % intervals over prompts. Gradient mass: sum of |dJ/dlog_probs| over tokens."
    )
    return ReportSection("By response length", (text,), figures, (Table("Clip fraction by length in tokens", columns, rows),))


def _cosine(study: Study) -> ReportSection:
    series: dict[str, Series] = {}
    rows: list[list[Cell]] = []
    for rule in study.rules:
        if rule.cosine:
            low, high = rule.cosine.interval or (None, None)
            series[rule.label] = Series(rule.replayed.profile.median_length, rule.cosine.by_length)
            rows.append([rule.label, rule.cosine.mean, low, high, rule.cosine.num_updates])
    text = (
        "Between the gradient of each rule and that of the mean of exp(S) A, the importance-weighted objective without a clip, "
        "through the weights that the run kept. A rule's weights by length turn its gradient too, without any clip."
    )
    table = Table("Over the updates whose weights were kept", ["policy", "cosine", "95 % from", "to", "updates"], rows)
    return ReportSection("Cosine to the unclipped gradient", (text,), (profile(series, ylabel="cosine"),), (table,))


def _widths(study: Study) -> ReportSection:
    names = {"clip_fraction": "clip fraction", "lre_max": "lre_max", "ess": "effective sample size"}
    if any(point.cosine is not None for points in study.sweep.values() for point in points):
        names["cosine"] = "cosine to the unclipped gradient"
    figures = []
    for name, ylabel in names.items():
        known = {
            label: [(point.factor, getattr(point, name)) for point in points if getattr(point, name) is not None]
            for label, points in study.sweep.items()
        }
        series = {label: Series([x for x, _ in pairs], [y for _, y in pairs]) for label, pairs in known.items()}
        figures.append(lines(series, xlabel="width, relative to the table above", ylabel=ylabel, log_x=True))
    rows: list[list[Cell]] = [
        [label, point.factor, point.clip_fraction, point.lre_max, point.lre_noise, point.ess, point.cosine]
        for label, points in study.sweep.items()
        for point in points
    ]
    columns = ["policy", "factor", "clip fraction", "lre_max", "noise", "ess", "cosine"]
    text = "All widths of a rule times one factor."
    return ReportSection("By width", (text,), figures, (Table("Every width", columns, rows),))


def _shape(study: Study) -> ReportSection:
    found = study.rules[0].replayed.profile
    rows: list[list[Cell]] = [
        [f"standard deviation of S / sqrt(L), bin {k}", value] for k, value in enumerate(found.sigma_root)
    ]
    normal = ("-1.64", "-0.67", "0", "0.67", "1.64")
    for quantile, expected, value in zip(QUANTILES, normal, found.standardised, strict=True):
        rows.append([f"{quantile:.0%} quantile of (S - mu L) / (sigma sqrt(L)); a normal's is {expected}", value])
    rows.append(["mean of S of a long response, in its standard deviations", found.drift])
    caption = "S: summed log-ratio of a response, over the updates that moved it"
    table = Table(caption, ["quantity", "value"], rows)
    text = "The square-root band is fair if S is normal with a variance that grows with L: then the first six lines are equal."
    return ReportSection("Is S normal?", (text,), (), (table,))
