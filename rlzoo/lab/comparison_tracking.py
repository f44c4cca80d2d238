"""Logs a comparison to MLflow: every run's length error at the matched clip fraction, and the report in a separate run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.store import artifact_repository, connected, find_run, is_missing
from rlzoo.journal.tracking.uploads import run_id_of, tracking_uri
from rlzoo.journal.tracking.views import REPORT
from rlzoo.lab.compare import Comparison
from rlzoo.measure.colours import RULE_TAG

TAG = "rlzoo_comparison"
PARENT = "mlflow.parentRunId"
LONGEST_NAME = 250


def log_comparison(comparison: Comparison, page: Path) -> None:
    """Log a comparison to the current MLflow store, for the runs that the store contains.

    Each run gets the metrics ``lre_at_<fraction>`` and ``lre_noise_at_<fraction>``; a rule that clips tokens or turns gets
    ``lre_tokens_at_<fraction>`` and ``lre_noise_tokens_at_<fraction>`` (see `Comparison.highlights`). The report is stored as
    an artifact of a separate run; repeating the comparison overwrites it.
    """
    runs = [(rule, run, run_id) for rule in comparison.rules for run in rule.runs if (run_id := run_id_of(run.path))]
    if not runs or is_missing(tracking_uri()):
        return
    with connected("the comparison was not logged") as client:
        stored = []
        for rule, run, run_id in runs:
            entry = find_run(client, run_id)
            if entry is None or entry.info.lifecycle_stage != "active":
                continue
            stored.append(entry)
            profile = rule.matched.get(run.seed)
            if profile is not None and profile.lre_max is not None:
                unit = "_tokens" if rule.clips_parts else ""
                for name, value in (("lre", profile.lre_max), ("lre_noise", profile.lre_noise or 0.0)):
                    client.log_metric(run_id, f"{name}{unit}_at_{comparison.match:g}", round(value, 4), synchronous=True)
        if stored:
            report = _report_run(client, comparison, page, stored)
            note = "\n\n".join([*comparison.highlights, "The report is the artifact `compare.html`."])
            client.set_tag(report, NOTE, note, synchronous=True)
            artifact_repository(client.get_run(report).info.artifact_uri, tracking_uri()).log_artifact(str(page))


def _report_run(client: Any, comparison: Comparison, page: Path, runs: Sequence[Any]) -> str:
    """Return the ID of the run that holds the report; it is nested like the compared runs, and a later comparison reuses it."""
    (experiment, *_) = {run.info.experiment_id for run in runs}
    mark = hashlib.sha256(str(page.resolve()).encode()).hexdigest()[:16]
    for report in client.search_runs([experiment], f"tags.{TAG} = '{mark}'"):
        return str(report.info.run_id)
    parents = {run.data.tags.get(PARENT) for run in runs}
    tags = {TAG: mark, RULE_TAG: REPORT} | ({PARENT: parent} if len(parents) == 1 and (parent := parents.pop()) else {})
    name = f"compare {', '.join(rule.label for rule in comparison.rules)}"
    run_id = str(client.create_run(experiment, run_name=name[:LONGEST_NAME], tags=tags).info.run_id)
    client.set_terminated(run_id)
    return run_id
