"""Logs a comparison to MLflow: every run's length error at the matched clip fraction, and the report in a separate run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.store import artifact_repository, connected, find_run, is_missing
from rlzoo.journal.tracking.uploads import run_id_of, tracking_uri
from rlzoo.journal.tracking.views import REPORT
from rlzoo.lab.races import Race
from rlzoo.measure.colours import RULE_TAG

TAG = "rlzoo_comparison"
PARENT = "mlflow.parentRunId"
LONGEST_NAME = 250


def log_race(race: Race, page: Path) -> None:
    """Log a comparison to the current MLflow store, for the runs that the store contains.

    Each run gets the metrics ``lre_at_<fraction>`` and ``lre_noise_at_<fraction>``. The report is stored as an
    artifact of a separate run; repeating the comparison overwrites it.
    """
    run_ids = {
        (contender.label, run.seed): run_id
        for contender in race.contenders
        for run in contender.runs
        if (run_id := run_id_of(run.path)) is not None
    }
    if not run_ids or is_missing(tracking_uri()):
        return
    with connected("the comparison was not logged") as client:
        found = {key: run for key, run_id in run_ids.items() if (run := find_run(client, run_id)) is not None}
        found = {key: run for key, run in found.items() if run.info.lifecycle_stage == "active"}
        if not found:
            return
        for contender in race.contenders:
            for seed, profile in contender.matched.items():
                if (contender.label, seed) in found and profile.lre_max is not None:
                    run_id = run_ids[contender.label, seed]
                    client.log_metric(run_id, f"lre_at_{race.match:g}", round(profile.lre_max, 4), synchronous=True)
                    noise = round(profile.lre_noise or 0.0, 4)
                    client.log_metric(run_id, f"lre_noise_at_{race.match:g}", noise, synchronous=True)
        report = _report_run(client, race, page, found)
        note = "\n\n".join([*race.highlights, "The report is the artifact `compare.html`."])
        client.set_tag(report, NOTE, note, synchronous=True)
        artifact_repository(client.get_run(report).info.artifact_uri, tracking_uri()).log_artifact(str(page))


def _report_run(client: Any, race: Race, page: Path, runs: Mapping[Any, Any]) -> str:
    """Return the ID of the run that holds the report; it is nested like the compared runs, and a later comparison reuses it."""
    (experiment, *_) = {run.info.experiment_id for run in runs.values()}
    mark = hashlib.sha256(str(page.resolve()).encode()).hexdigest()[:16]
    for known in client.search_runs([experiment], f"tags.{TAG} = '{mark}'"):
        return str(known.info.run_id)
    parents = {run.data.tags.get(PARENT) for run in runs.values()}
    tags = {TAG: mark, RULE_TAG: REPORT} | ({PARENT: parent} if len(parents) == 1 and (parent := parents.pop()) else {})
    name = f"compare {', '.join(contender.label for contender in race.contenders)}"
    made = str(client.create_run(experiment, run_name=name[:LONGEST_NAME], tags=tags).info.run_id)
    client.set_terminated(made)
    return made
