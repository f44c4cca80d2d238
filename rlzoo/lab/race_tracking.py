"""Logs every run's length error at the matched clip fraction to MLflow."""

from __future__ import annotations

from rlzoo.journal.tracking.record import run_id_of, tracking_uri
from rlzoo.journal.tracking.store import connected, find_run, is_missing
from rlzoo.lab.races import Race


def log_race(race: Race) -> None:
    """Log ``lre_at_<fraction>`` and ``lre_noise_at_<fraction>`` for the compared runs that the current MLflow store has."""
    found = [
        (run_id, profile.lre_max, profile.lre_noise or 0.0)
        for contender in race.contenders
        for run in contender.runs
        if (profile := contender.matched.get(run.seed)) and profile.lre_max is not None and (run_id := run_id_of(run.path))
    ]
    if not found or is_missing(tracking_uri()):
        return
    with connected("the comparison was not logged") as client:
        for run_id, error, noise in found:
            if (run := find_run(client, run_id)) is not None and run.info.lifecycle_stage == "active":
                client.log_metric(run_id, f"lre_at_{race.match:g}", round(error, 4), synchronous=True)
                client.log_metric(run_id, f"lre_noise_at_{race.match:g}", round(noise, 4), synchronous=True)
