"""Logs every run's length error at the matched clip fraction to MLflow."""

from __future__ import annotations

from rlzoo.journal.tracking.store import connected, find_run, is_missing
from rlzoo.journal.tracking.uploads import run_id_of, tracking_uri
from rlzoo.lab.compare import Comparison


def log_comparison(comparison: Comparison) -> None:
    """Log a comparison to the current MLflow store for each run that the store contains.

    The metrics are named ``lre_at_<fraction>`` and ``lre_noise_at_<fraction>`` or, for a rule that clips tokens or turns,
    ``lre_tokens_at_<fraction>`` and ``lre_noise_tokens_at_<fraction>`` (see `Comparison.highlights`).
    """
    runs = [(rule, run, run_id) for rule in comparison.rules for run in rule.runs if (run_id := run_id_of(run.path))]
    if not runs or is_missing(tracking_uri()):
        return
    with connected("the comparison was not logged") as client:
        for rule, run, run_id in runs:
            entry, profile = find_run(client, run_id), rule.matched.get(run.seed)
            if entry is None or entry.info.lifecycle_stage != "active" or profile is None or profile.lre_max is None:
                continue
            unit = "_tokens" if rule.clips_parts else ""
            for name, value in (("lre", profile.lre_max), ("lre_noise", profile.lre_noise or 0.0)):
                client.log_metric(run_id, f"{name}{unit}_at_{comparison.match:g}", round(value, 4), synchronous=True)
