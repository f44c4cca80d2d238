"""`rlzoo fairness`: shows, by response length, how much recorded updates moved and clipped responses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.options import AsJson, Csv, Latex, Plugins, Quiet, loading, names_in
from rlzoo.cli.replay import Recording
from rlzoo.cli.tables import check_files, number, report_table, save_tables

if TYPE_CHECKING:
    from rlzoo.measure.drift import Drift
    from rlzoo.measure.report import Row, Table


def fairness(
    recording: Recording,
    clip: Annotated[
        str | None, typer.Option(help="Comma-separated rules; by default the rule that the run was trained with.")
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
    csv: Csv = None,
    latex: Latex = None,
    quiet: Quiet = False,
) -> None:
    """Show which response lengths a run moved and clipped most.

    The rollouts come from a run of rlzoo, or from any trainer that writes rollout files (docs/reference/rollout-files.md).
    """
    check_files(csv, latex)
    with loading(is_quiet=quiet):
        from rlzoo.core.errors import UserError
        from rlzoo.lab.recorded import RecordedRun
        from rlzoo.lab.study import plain, replay
        from rlzoo.measure.drift import Drift
    run = RecordedRun.read(recording, plugin or [])
    drift = Drift.of(update.inputs for update in run.updates)
    if drift is None:
        raise UserError(
            f"{str(run.path)!r} has no response with a nonzero advantage whose log-probs had moved before an "
            "update; with one optimizer step per batch, every ratio is 1 and no rule clips"
        )
    names = names_in("--clip", clip, "comma-separated rules; see `rlzoo clips list`") if clip else ()
    rules = names or ([run.rule] if run.rule else [])
    judged = replay(run, rules, plugins=plugin or []) if rules else None
    tables = [_drift_table(drift), *(judged.tables() if judged else ())]
    save_tables(tables, csv, latex)
    if as_json:
        facts = {"run": str(run.path), "trained_with": run.trained_with, "num_responses": run.num_responses, "drift": drift}
        print(json.dumps({**plain(facts), "note": run.problem, "rules": judged.as_dict()["rules"] if judged else []}, indent=2))
        return
    console = Plain()
    console.print(f"{run.num_responses:,} recorded responses in {run.path}, trained with {run.trained_with}")
    console.print(report_table(tables[0]))
    console.print(
        f"sd S grows as the length to the power {number(drift.exponent)}; {number(drift.moved)} of the responses had moved"
    )
    if judged is None:
        reason = f"{run.problem}; or" if run.problem else "to see which lengths a rule would have clipped,"
        console.print(f"{reason} name rules with --clip, such as --clip fspo,gspo,grpo")
    for content in tables[1:]:
        console.print(report_table(content))


def _drift_table(drift: Drift) -> Table:
    from rlzoo.measure.profile import labels
    from rlzoo.measure.report import Table

    rows: list[Row] = [
        ["responses", *drift.count],
        ["A < 0", *drift.negative],
        ["mean S", *drift.mean],
        ["sd S", *drift.sigma],
        ["sd S/sqrt(L)", *drift.sigma_root],
        ["sd S/L", *drift.sigma_mean],
        ["sd to sampler", *drift.mismatch],
    ]
    return Table("summed log-ratio S, with spread sd, by length L", ["", *labels(drift.edges)], rows)
