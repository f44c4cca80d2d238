"""``check``: checks rules, estimators and corrections against the laws, and shows the smallest inputs that break a law."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlzoo.cli.console import Plain
from rlzoo.cli.options import loading
from rlzoo.cli.portrait import COMPARED, as_dict, print_portraits
from rlzoo.cli.tables import table

if TYPE_CHECKING:
    from rlzoo.core.policy import ClipPolicy
    from rlzoo.core.types import ClipInputs
    from rlzoo.testing import Outcome, Portrait

STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "opted out": "dim"}
SHOWN = 8  # maximum number of rows and of tokens to print for a failing input


def check_rules(policies: Sequence[type[ClipPolicy]], *, as_json: bool) -> list[dict[str, Any]]:
    """Check rules against the laws, print the outcomes with their portraits unless ``as_json``, and return them."""
    with loading():
        from rlzoo.core.policy import with_defaults
        from rlzoo.core.zoo import load_zoo
        from rlzoo.testing import check, portrait
    console, reports = Plain(), list[dict[str, Any]]()
    beside: Portrait | None = None
    for policy in policies:
        started = time.perf_counter()
        made = with_defaults(policy)
        outcomes = check(made)
        try:
            drawn = portrait(made)
        except Exception:  # a rule that raises an error has already failed a law
            drawn = None
        reports.append({**_as_dict(policy, outcomes), "portrait": drawn and as_dict(drawn)})
        if as_json:
            continue
        _print(console, policy, outcomes, time.perf_counter() - started)
        if drawn is not None:
            beside = beside or portrait(load_zoo()[COMPARED]())
            print_portraits(console, [drawn] if policy.name == COMPARED else [drawn, beside])
            console.print("")
    return reports


def check_parts(kind: str, parts: Sequence[Any], *, as_json: bool) -> list[dict[str, Any]]:
    """Check estimators or corrections against their laws, print the outcomes unless ``as_json``, and return them."""
    with loading():
        from rlzoo.testing import ADVANTAGE_LAWS, CORRECTION_LAWS
        from rlzoo.testing.parts import broken
    laws: Any = ADVANTAGE_LAWS if kind == "advantages" else CORRECTION_LAWS
    console, reports = Plain(), list[dict[str, Any]]()
    for part in parts:
        found = dict(broken(laws, part))
        outcomes = [
            {
                "law": law.name,
                "status": "opted out" if law.name in part.exempt else "fail" if law.name in found else "pass",
                "detail": part.exempt.get(law.name, found.get(law.name, "")),
            }
            for law in laws
        ]
        reports.append({"name": part.name, "laws": outcomes})
        if as_json:
            continue
        rows = table("<law", "<", "<")
        for outcome in outcomes:
            rows.add_row(*map(Text, outcome.values()))
        console.print(Text.assemble((part.name, "bold"), f"  {part.paper}"))
        console.print(rows)
        opted_out = sum(outcome["status"] == "opted out" for outcome in outcomes)
        console.print(f"{len(laws) - len(found) - opted_out} kept, {len(found)} broken, {opted_out} opted out\n")
    return reports


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
