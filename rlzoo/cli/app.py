"""The commands and their options; whatever is slow to import is imported inside the command that needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlzoo.cli.clips_app import clips
from rlzoo.cli.options import AsJson, Plugins, Quiet, interruptible, lasting_output, loading
from rlzoo.cli.train_app import calibrate, sweep, train

app = typer.Typer(
    name="rlzoo",
    help="Train language models with any clipping rule of the zoo, and compare the rules.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(clips, name="clips")
app.command()(train)


@app.command()
def sync(runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories, such as runs/*.")]) -> None:
    """Tell MLflow what it missed while it could not be reached; nothing is sent twice."""
    from rlzoo.cli.exits import FAILED
    from rlzoo.cli.sync import sync as send

    if not send(runs):
        raise typer.Exit(FAILED)


app.command()(sweep)
app.command()(calibrate)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    clip: Annotated[str, typer.Option(help="Clip policies, with commas between them.")],
    match: Annotated[
        float | None,
        typer.Option("--match-clip-fraction", min=0.001, max=0.9, help="Scale every rule's widths to this clip fraction."),
    ] = None,
    sweep_width: Annotated[bool, typer.Option("--sweep-width", help="Also each rule from 1/16 to 16 times its width.")] = False,
    skip_steps: Annotated[int, typer.Option(min=0, help="Steps at the beginning to leave out of what is reported.")] = 0,
    cosine: Annotated[bool, typer.Option(help="Measure the angle to the unclipped gradient, if weights were kept.")] = True,
    config: Annotated[list[str] | None, typer.Option(help="Config with the policies' settings; later ones win.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the policies, such as clip.drift=0.")
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
    report: Annotated[Path | None, typer.Option(help="HTML report to write; RUN/replay.html without it.")] = None,
    quiet: Quiet = False,
) -> None:
    """Judge one run's recorded rollouts by other rules: what each would have clipped of the same data."""
    with interruptible():
        with loading(is_quiet=quiet):
            from rlzoo.cli.replay import run_replay

        run_replay(
            path=run,
            clips=clip,
            configs=config or [],
            overrides=set_ or [],
            plugins=plugin or [],
            match=match,
            sweep_width=sweep_width,
            skip_steps=skip_steps,
            with_cosine=cosine,
            as_json=as_json,
            report=report,
            is_quiet=quiet,
        )


@app.command("eval")
def eval_(
    model: Annotated[str, typer.Argument(help="'embedded', 'smollm2', a folder, a run directory, or a name on the hub.")],
    suite: Annotated[
        str,
        typer.Option(help="Suites with commas between them: gsm8k, math500, amc23, aime24, aime25, arithmetic, your own."),
    ],
    k: Annotated[int, typer.Option("--k", min=1, max=4096, help="Responses per problem.")] = 16,
    temperature: Annotated[float, typer.Option(help="Sampling temperature.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length limit of a response, in tokens.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Responses sampled at once.")] = 64,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first problems of each suite.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of local copies, such as gsm8k.jsonl; the hub without it.")] = None,
    chat_template: Annotated[
        bool | None, typer.Option("--chat-template/--no-chat-template", help="Default: if the tokenizer has one.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another setting, such as model.dtype=bfloat16."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder; an evaluation begun in it goes on.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    mlflow: Annotated[bool, typer.Option("--mlflow/--no-mlflow", help="Log the results to MLflow.")] = True,
) -> None:
    """Evaluate a model: mean@k, pass@k and maj@k on mathematics suites; started again, it goes on."""
    options = {"group_size": k, "temperature": temperature, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    overrides = [f"rollout.{key}={value}" for key, value in options.items()]
    overrides += [] if chat_template is None else [f"model.chat_template={chat_template}"]
    with interruptible(), lasting_output():
        with loading(is_quiet=quiet):
            from rlzoo.cli.evaluate import run_evaluation

        run_evaluation(
            model=model,
            suites=suite,
            overrides=[*overrides, *(set_ or [])],
            settings={"seed": seed, "limit": limit},
            data=data,
            output=output,
            as_json=as_json,
            mlflow=mlflow,
            is_quiet=quiet,
        )


@app.command()
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run directories, or folders that hold some, such as a sweep's.")],
    match: Annotated[
        float, typer.Option("--match-clip-fraction", min=0.001, max=0.9, help="Clip fraction at which to compare fairness.")
    ] = 0.1,
    skip_steps: Annotated[int, typer.Option(min=0, help="Steps at the beginning to leave out of fairness.")] = 0,
    as_json: AsJson = False,
    report: Annotated[Path | None, typer.Option(help="HTML report to write; compare.html beside the runs without it.")] = None,
) -> None:
    """Compare runs by policy: scores with intervals, pairs, fairness by length, time and memory."""
    with interruptible():
        with loading():
            from rlzoo.cli.compare import compare as show

        show(runs, as_json=as_json, report=report, match=match, skip_steps=skip_steps)


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 5000,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others can reach needs --allow-remote.")
    ] = "127.0.0.1",
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let other machines in; MLflow asks for no password.")
    ] = False,
) -> None:
    """Open MLflow's UI on the store that `rlzoo train` writes to, for this machine only."""
    from rlzoo.cli.ui import serve

    serve(port, host, allow_remote=allow_remote)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what is installed and what this machine can run."""
    with loading():
        from rlzoo.cli.doctor import report

    report(as_json)


def _version(show: bool) -> None:
    if show:
        from importlib.metadata import version

        typer.echo(f"rlzoo {version('rlzoo')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass
