"""``check``: checks rules, estimators and corrections against the laws, and shows the smallest inputs that break a law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlzoo.cli.console import Plain
from rlzoo.cli.kinds import CLIPS, Kind
from rlzoo.cli.options import loading
from rlzoo.cli.portrait import COMPARED, as_dict, print_portraits
from rlzoo.cli.tables import table

if TYPE_CHECKING:
    from rlzoo.core.types import ClipInputs
    from rlzoo.testing import Outcome

STYLES = {"pass": "green", "fail": "bold red", "opted out": "dim"}
SHOWN = 8  # maximum number of rows and of tokens to print for a failing input


def check(kind: Kind, plugins: Sequence[Any], *, as_json: bool) -> list[dict[str, Any]]:
    """Check rules, estimators or corrections against the laws; print the outcomes unless ``as_json``, and return them."""
    with loading():
        from rlzoo import testing
        from rlzoo.core.zoo import load_zoo
        from rlzoo.testing.check import laws_for
    console, reports = Plain(), list[dict[str, Any]]()
    for plugin in plugins:
        outcomes = testing.check(plugin)
        reports.append(
            {"policy" if kind is CLIPS else "name": plugin.name, "laws": [_as_dict(outcome) for outcome in outcomes]}
        )
        if not as_json:
            _print(console, plugin, outcomes, {law.name: law.statement for law in laws_for(plugin)})
        if kind is not CLIPS:
            continue
        try:
            portrait = testing.portrait(plugin)
        except Exception:  # a rule that raises an error has already failed a law
            reports[-1]["portrait"] = None
            continue
        reports[-1]["portrait"] = as_dict(portrait)
        if not as_json:
            beside = [] if plugin.name == COMPARED else [testing.portrait(load_zoo()[COMPARED]())]
            print_portraits(console, [portrait, *beside])
    return reports


def _print(console: Plain, plugin: Any, outcomes: list[Outcome], statements: dict[str, str]) -> None:
    rows = table("<", "<law", "<", "<")
    for number, outcome in enumerate(outcomes, start=1):
        rows.add_row(str(number), outcome.law, Text(outcome.status, style=STYLES[outcome.status]), Text(outcome.detail))
    console.print(Text.assemble((plugin.name, "bold"), f"  {plugin.paper}"))  # brackets are not markup
    console.print(rows)
    for outcome in outcomes:
        if outcome.status == "fail":
            console.print(f"\n{outcome.law}: {statements[outcome.law]}", style="bold")
        if outcome.inputs is not None:
            console.print(Text(f"fails on\n{describe(outcome.inputs)}"))
    count = Counter(outcome.status for outcome in outcomes)
    console.print(f"{count['pass']} kept, {count['fail']} broken, {count['opted out']} opted out\n")


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


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome with its inputs as lists, truncated to `SHOWN` rows and tokens, because some inputs are long."""
    from rlzoo.testing.data import ALL_FIELDS

    inputs = None
    if outcome.inputs is not None:
        tensors = {name: values for name in ALL_FIELDS if (values := getattr(outcome.inputs, name)) is not None}
        inputs = {name: values[:SHOWN, :SHOWN].tolist() for name, values in tensors.items()}
    return {"law": outcome.law, "status": outcome.status, "detail": outcome.detail, "inputs": inputs}
