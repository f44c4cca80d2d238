"""`rlzoo replay`: applies other rules to recorded rollouts, prints tables or JSON, and writes an HTML report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlzoo.cli.console import Plain
from rlzoo.cli.options import AsJson, Configs, Csv, Latex, MatchBySign, Plugins, Quiet, loading, names_in
from rlzoo.cli.pages import check_page, write_page
from rlzoo.cli.tables import check_files, report_table, save_tables
from rlzoo.core.errors import UserError

if TYPE_CHECKING:
    from rlzoo.lab.study import Study


Recording = Annotated[
    list[Path],
    typer.Argument(
        metavar="RUN|FILE", help="Run directory, or rollout files and folders with rollout files, which are read as one run."
    ),
]


def replay(
    recording: Recording,
    clip: Annotated[str, typer.Option(help="Comma-separated rules, such as fspo,gspo.")],
    match: Annotated[
        float | None,
        typer.Option(
            "--match-clip-fraction", min=0.001, max=0.9, help="Scale every rule's widths to reach this clip fraction."
        ),
    ] = None,
    match_by_sign: MatchBySign = False,
    skip_steps: Annotated[int, typer.Option(min=0, help="Number of initial steps to exclude from the results.")] = 0,
    config: Configs = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the rules, such as clip.drift=0.")
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
    report: Annotated[
        Path | None, typer.Option(help="HTML report to write; by default replay.html in the run directory.")
    ] = None,
    differences: Annotated[
        Path | None, typer.Option(metavar="FILE", help="HTML page of the responses on which two rules differ most.")
    ] = None,
    csv: Csv = None,
    latex: Latex = None,
    quiet: Quiet = False,
) -> None:
    """Show what each rule would have clipped in a recording.

    The rollouts come from a run of rlzoo, or from any trainer that writes rollout files (docs/reference/rollout-files.md).
    """
    if match_by_sign and match is None:
        raise UserError("--match-by-sign needs a clip fraction to match; add --match-clip-fraction 0.1")
    check_files(csv, latex, report, differences)
    with loading(is_quiet=quiet):
        from rlzoo.cli.bars import Bars
        from rlzoo.lab.differences import differences_page
        from rlzoo.lab.recorded import RecordedRun
        from rlzoo.lab.study import replay as study
    recorded = RecordedRun.read(recording, plugin or [], own_code=True)
    names = names_in("--clip", clip, "comma-separated rules; see `rlzoo clips list`")
    if differences:
        check_page(differences, option="--differences")
        if len(names) != 2:
            raise UserError(f"--differences compares two rules, but --clip {clip!r} names {len(names)}; use --clip A,B")
    page = report or (None if as_json or not recorded.config else recorded.path / "replay.html")
    if page:
        check_page(page)
    with Bars(Plain(stderr=True), is_quiet=quiet, transient=True) as bars:
        result = study(
            recorded,
            names,
            configs=config or [],
            overrides=set_ or [],
            plugins=plugin or [],
            match=match,
            by_sign=match_by_sign,
            skip_steps=skip_steps,
            progress=bars.reach,
        )
    if as_json:
        print(json.dumps(result.as_dict(), indent=2))
    else:
        _print(Plain(), result)
    save_tables(list(result.tables()), csv, latex)
    if differences:
        write_page(differences, differences_page(result), option="--differences")
        if not quiet:
            Plain(stderr=as_json).print(f"differences {differences}")
    if page:
        from rlzoo.lab.reports import study_report

        write_page(page, study_report(result))
        if not quiet:
            Plain(stderr=as_json).print(f"report {page}")


def _print(console: Plain, result: Study) -> None:
    console.print(result.about)
    for content in result.tables():
        console.print(report_table(content))
    console.print("\n".join(result.notes))
    unmoved = result.rules[0].profile.unmoved
    console.print(f"{unmoved:.0%} of the responses had not moved yet, so no rule can clip them")
