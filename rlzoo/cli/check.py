"""`rlzoo clips check`: checks a rule against the laws, and prints its portrait and the smallest inputs that break a law."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rlzoo.cli import complete
from rlzoo.cli.console import Plain
from rlzoo.cli.exits import FAILED
from rlzoo.cli.options import AsJson, loading, refuse_config
from rlzoo.cli.portrait import COMPARED, as_dict, print_portraits
from rlzoo.cli.tables import table

if TYPE_CHECKING:
    from rlzoo.policy import ClipPolicy
    from rlzoo.testing import Outcome, Portrait
    from rlzoo.types import ClipInputs

STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "opted out": "dim"}
SHOWN = 8  # maximum number of rows and of tokens to print for a failing input


def clips_check(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|PATH", autocompletion=complete.policies, help="A rule's name, or a plugin file or folder."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Check a rule against the laws, and measure where it cuts off the gradient; exit with code 1 if it breaks a law."""
    with loading():
        from rlzoo.policy import with_defaults
        from rlzoo.testing import check, portrait
        from rlzoo.zoo import find_policies, load_zoo
    zoo = load_zoo()
    if name not in zoo:
        refuse_config(name)
    console = Plain()
    reports: list[dict[str, Any]] = []
    has_failed = False
    beside: Portrait | None = None
    for policy in find_policies(name):
        started = time.perf_counter()
        made = with_defaults(policy)
        outcomes = check(made)
        has_failed |= any(outcome.status == "fail" for outcome in outcomes)
        try:
            drawn = portrait(made)
        except Exception:  # a rule that raises an error has already failed a law
            drawn = None
        if as_json:
            reports.append({**_as_dict(policy, outcomes), "portrait": drawn and as_dict(drawn)})
            continue
        _print(console, policy, outcomes, time.perf_counter() - started)
        if drawn is not None:
            beside = beside or portrait(zoo[COMPARED]())
            print_portraits(console, [drawn] if policy.name == COMPARED else [drawn, beside])
            console.print("")
    if as_json:
        print(json.dumps(reports, indent=2))
    if has_failed:
        raise typer.Exit(FAILED)


def _print(console: Plain, policy: type[ClipPolicy], outcomes: list[Outcome], seconds: float) -> None:
    from rlzoo.testing import LAWS

    rows = table("<", "<law", "<", "<")
    for number, (law, outcome) in enumerate(zip(LAWS, outcomes, strict=True), start=1):
        rows.add_row(str(number), law.name, Text(outcome.status, style=STYLES[outcome.status]), Text(outcome.detail))
    statements = {law.name: law.statement for law in LAWS}
    failed = [outcome for outcome in outcomes if outcome.status == "fail"]
    opted_out, warned = (sum(outcome.status == status for outcome in outcomes) for status in ("opted out", "warn"))
    console.print(Text.assemble((policy.name, "bold"), f"  {policy.paper}"))  # brackets are not markup
    console.print(rows)
    for outcome in failed:
        console.print(f"\n{outcome.law}: {statements[outcome.law]}", style="bold")
        if outcome.inputs is not None:
            console.print(Text(f"fails on\n{describe(outcome.inputs)}"))
    kept = len(outcomes) - len(failed) - opted_out
    advice = f" ({warned} with a warning)" if warned else ""
    console.print(f"{kept} kept{advice}, {len(failed)} broken, {opted_out} opted out, in {seconds:.1f} s\n")


def describe(inputs: ClipInputs) -> str:
    """Format inputs as one line per response, with advantages and log-ratios; masked tokens are dashes."""
    lines = []
    for row in range(min(len(inputs.log_probs), SHOWN)):
        mask = inputs.response_mask[row].tolist()
        ratios = (inputs.log_probs - inputs.old_log_probs)[row].tolist()
        tokens = [f"{ratio:+.3g}" if shown else "-" for ratio, shown in zip(ratios, mask, strict=True)]
        advantages = [f"{value:+.3g}" for value in inputs.advantages[row].tolist()]
        lines.append(f"  A = {_cut(advantages)}: log-ratios {_cut(tokens)}")
    return "\n".join(lines)


def _cut(words: list[str]) -> str:
    return " ".join([*words[:SHOWN], *(["..."] if len(words) > SHOWN else [])])


def _as_dict(policy: type[ClipPolicy], outcomes: list[Outcome]) -> dict[str, Any]:
    laws = [
        {"law": each.law, "status": each.status, "detail": each.detail, "inputs": each.inputs and _tensors(each.inputs)}
        for each in outcomes
    ]
    return {"policy": policy.name, "laws": laws}


def _tensors(inputs: ClipInputs) -> dict[str, Any]:
    """Return inputs as lists, truncated to `SHOWN` rows and tokens, because the inputs of some laws are long."""
    from rlzoo.testing.data import ALL_FIELDS

    given = {name: values for name in ALL_FIELDS if (values := getattr(inputs, name)) is not None}
    return {name: values[:SHOWN, :SHOWN].tolist() for name, values in given.items()}
