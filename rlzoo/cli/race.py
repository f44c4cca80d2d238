"""`rlzoo race`: tunes and trains all rules in the same way on standard tracks, then shows and collects the results."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rlzoo.cli.console import Plain
from rlzoo.cli.kinds import CLIPS
from rlzoo.cli.options import Cpus, Gpus, On, Quiet, lasting_output, loading, names_in
from rlzoo.cli.sweep import executor, finish
from rlzoo.cli.tables import report_table, table
from rlzoo.core.errors import RunError, UserError

if TYPE_CHECKING:
    from rlzoo.lab.results import Standings
    from rlzoo.lab.sweep import Sweep

WIDTH = 48  # width of a plotted interval in characters

app = typer.Typer(help="Race rules on standard tracks. All are tuned and evaluated in the same way.", no_args_is_help=True)
FOLDER = Path("races")

TrackName = Annotated[str, typer.Option("--track", help="Track: sums, sums-again or off-policy, or a YAML file.")]
Output = Annotated[Path, typer.Option(help="Folder of the races.")]


@app.command("run")
@lasting_output()
def run(
    track: TrackName,
    clip: Annotated[str, typer.Option(help="Comma-separated rules, or the file of a rule.")],
    output: Output = FOLDER,
    jobs: Annotated[int | None, typer.Option(min=1, max=256, help="Number of runs at once; by default, one per core.")] = None,
    on: On = "local",
    cpus: Cpus = 1,
    gpus: Gpus = 0,
    quiet: Quiet = False,
) -> None:
    """Calibrate, tune and train rules on a track. Rerun the command to resume."""
    specs = names_in("--clip", clip, "comma-separated rules; see `rlzoo clips list`")
    with loading(is_quiet=quiet):
        from rlzoo.lab.race import race
        from rlzoo.lab.track import Track
    course, console, failed = Track.read(track), Plain(), list[str]()
    folder, execute = output / course.name, executor(on, jobs, cpus, gpus)
    entrants = [
        (entry.kind.name, [spec] if is_path else [])
        for spec in specs
        for _, entries, is_path in [CLIPS.find(spec, None)]
        for entry in entries
    ]

    def run_all(sweep: Sweep) -> None:
        finish(sweep, execute, console, is_quiet=quiet)

    for rule, plugins in entrants:
        try:
            result = race(course, rule, plugins, folder, run_all, console.print)
        except RunError as error:
            failed.append(str(error))
            console.print(failed[-1], style="red")
            continue
        summary = result.summary()
        console.print(f"{rule}: {summary['reward']:.3f} with learning rate {summary['learning_rate']:g}")
    if failed:
        raise RunError(f"{len(failed)} of {len(entrants)} rules have no result; {failed[0]}")
    console.print(f"show the table with: rlzoo race show --track {track}{'' if output == FOLDER else f' --output {output}'}")


@app.command("show")
def show(track: TrackName, output: Output = FOLDER) -> None:
    """Print the table of a track. Results in the folder of the races replace shipped ones."""
    with loading():
        from rlzoo.lab.results import SHIPPED, Standings
        from rlzoo.lab.track import Track
    standings = Standings.of(Track.read(track), [*SHIPPED, output])
    if not standings.results:
        raise UserError(f"no results for the track {track}; make one with: rlzoo race run --track {track} --clip NAME")
    console = Plain()
    for sentence in standings.sentences():
        console.print(sentence)
    for content in standings.tables():
        console.print(report_table(content))
    console.print(_picture(standings, console))


def _picture(standings: Standings, console: Plain) -> Table:
    """Plot every rule's difference from the reference rule, with the interval of the difference."""
    rows = table("<", "<", title=f"difference from {standings.track.reference}", show_header=False)
    means = {name: pair.mean or 0.0 for name, pair in standings.pairs.items()}
    intervals = {name: pair.interval or (means[name], means[name]) for name, pair in standings.pairs.items()}
    edges = [0.0, *(end for ends in intervals.values() for end in ends)]
    signs, spread = "│─┼●" if console.encoding.startswith("utf") else "|-+o", max(edges) - min(edges) or 1.0
    for name, ends in intervals.items():
        values = (*ends, 0.0, means[name])
        first, last, zero, dot = (round((WIDTH - 1) * (value - min(edges)) / spread) for value in values)
        bar = [" "] * WIDTH
        bar[first : last + 1] = signs[1] * (last + 1 - first)
        bar[zero], bar[dot] = signs[0] if bar[zero] == " " else signs[2], signs[3]
        rows.add_row(name, "".join(bar))
    return rows


@app.command("add")
def add(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json", help="Result of `rlzoo race run`.")],
    plugin: Annotated[Path | None, typer.Option(metavar="FILE.py", help="File of a rule that is not bundled.")] = None,
) -> None:
    """Check a result, and add it to this clone. The file of its rule is added too."""
    with loading():
        from rlzoo.lab.race import admit
        from rlzoo.lab.results import CLONE, Result, Standings
        from rlzoo.lab.track import Track
    if not CLONE.parent.is_dir():
        raise UserError("race add needs a clone of rlzoo, because results are part of the repository")
    submitted = Result.read(result)
    track = Track.read(submitted.track)
    admit(submitted, track, [plugin] if plugin else [], Standings.of(track, [CLONE]).results)
    target = CLONE / track.name / f"{submitted.rule}.json"
    if target.exists():
        raise UserError(f"{str(target)!r} exists; remove it to replace this result")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(result, target)
    if plugin and plugin.resolve() != (source := target.with_suffix(".py")).resolve():
        shutil.copyfile(plugin, source)
    Plain().print(f"added {target}")
