"""Logs a comparison to MLflow: every run's length error at the matched clip fraction, and the report in a separate run."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlzoo.errors import UserError
from rlzoo.journal.tracking.description import NOTE
from rlzoo.journal.tracking.record import run_id_of, tracking_uri
from rlzoo.journal.tracking.store import StoreError, artifact_repository, connected, is_missing
from rlzoo.journal.tracking.views import REPORT
from rlzoo.lab.races import Race
from rlzoo.support.colours import RULE_TAG

logger = logging.getLogger("rlzoo")

TAG = "rlzoo_comparison"
PARENT = "mlflow.parentRunId"
LONGEST_NAME = 250


def log_race(race: Race, page: Path) -> None:
    """Log a comparison to the current MLflow store, for the runs that the store contains; log a warning if that fails.

    Each run gets the metrics ``lre_at_<fraction>`` and ``lre_noise_at_<fraction>``. The report is stored as an
    artifact of a separate run; repeating the comparison overwrites it.
    """
    try:
        _log_race(race, page)
    except (StoreError, UserError) as error:
        logger.warning("the comparison was not logged: %s", error)


def _log_race(race: Race, page: Path) -> None:
    run_ids = {
        (contender.label, run.seed): run_id
        for contender in race.contenders
        for run in contender.runs
        if (run_id := run_id_of(run.path)) is not None
    }
    if not run_ids or is_missing(tracking_uri()):
        return
    with connected() as client:
        from mlflow import MlflowException
        from mlflow.entities import Metric, RunTag

        found = {}
        for key, run_id in run_ids.items():
            try:
                run = client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise  # the store cannot be reached
            else:
                found |= {key: run} if run.info.lifecycle_stage == "active" else {}
        if lost := len(run_ids) - len(found):
            logger.warning("%d of the %d tracked runs were deleted in MLflow; the comparison leaves them out there", lost, len(run_ids))
        if not found:
            return
        now = int(time.time() * 1000)
        for contender in race.contenders:
            for seed, profile in contender.matched.items():
                if (contender.label, seed) in found and profile.lre_max is not None:
                    values = {"lre_at": profile.lre_max, "lre_noise_at": profile.lre_noise or 0.0}
                    metrics = [Metric(f"{name}_{race.match:g}", round(value, 4), now, 0) for name, value in values.items()]
                    client.log_batch(run_ids[contender.label, seed], metrics=metrics, synchronous=True)
        report = _report_run(client, race, page, found)
        note = "\n\n".join([*race.highlights, "The report is the artifact `compare.html`."])
        client.log_batch(report, tags=[RunTag(NOTE, note)], synchronous=True)
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
