"""``check``: checks rules, estimators and corrections against the laws and shows the smallest inputs that break a law."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rlzoo.cli.console import Plain
from rlzoo.cli.kinds import CLIPS, Kind
from rlzoo.cli.options import loading
from rlzoo.cli.portrait import COMPARED, print_portraits
from rlzoo.cli.tables import table

if TYPE_CHECKING:
    from torch import Tensor

    from rlzoo.core.types import ClipInputs
    from rlzoo.testing import Outcome
    from rlzoo.testing.reach import Branch

STYLES = {"pass": "green", "fail": "bold red", "opted out": "dim"}
NONE = "no branch"
SHOWN = 8  # maximum number of rows and tokens to print for a failing input


def check(kind: Kind, plugins: Sequence[Any], *, as_json: bool) -> list[dict[str, Any]]:
    """Check rules, estimators or corrections against the laws. Return the outcomes, printing them unless ``as_json``."""
    with loading():
        from rlzoo import testing
        from rlzoo.core.zoo import load_zoo
        from rlzoo.testing.check import laws_for, reached
    console, reports = Plain(), list[dict[str, Any]]()
    for plugin in plugins:
        outcomes, passed, portrait = testing.check(plugin), [], None
        with suppress(Exception):  # a plugin that raises an error has already failed a law
            passed = reached(plugin)
            portrait = testing.portrait(plugin) if kind is CLIPS and not as_json else None
        laws = [
            {"law": one.law, "status": one.status, "detail": one.detail, "inputs": one.inputs and describe(plugin, one.inputs)}
            for one in outcomes
        ]
        number = min((branch.reached for branch in passed), default=NONE)
        reports.append({"name": plugin.name, "laws": laws, "reached": number})
        if not as_json:
            _print(console, plugin, outcomes, {law.name: law.statement for law in laws_for(plugin)})
            console.print(f"{_reach(passed)}\n")
        if portrait:
            beside = [] if plugin.name == COMPARED else [testing.portrait(load_zoo()[COMPARED]())]
            print_portraits(console, [portrait, *beside])
    return reports


def _print(console: Plain, plugin: Any, outcomes: list[Outcome], statements: dict[str, str]) -> None:
    rows, first = table("<", "<law", "<", "<"), {one.detail or one.law: one for one in reversed(outcomes)}
    shown = [(number, one) for number, one in enumerate(outcomes, start=1) if first[one.detail or one.law] is one]
    for number, outcome in shown:
        rows.add_row(str(number), outcome.law, Text(outcome.status, style=STYLES[outcome.status]), Text(outcome.detail))
    console.print(Text.assemble((plugin.name, "bold"), f"  {plugin.paper}"))  # `Text`, so that brackets are not read as markup
    console.print(rows)
    for _, outcome in shown:
        if outcome.status == "fail":
            console.print(f"\n{outcome.law}: {statements[outcome.law]}", style="bold")
        if outcome.inputs is not None:
            console.print(Text(f"fails on\n{describe(plugin, outcome.inputs)}"))
    count = Counter(outcome.status for outcome in outcomes)
    repeated = f" (not shown: {len(outcomes) - len(shown)} laws with the same result)" if len(shown) < len(outcomes) else ""
    console.print(f"{count['pass']} kept, {count['fail']} broken, {count['opted out']} opted out{repeated}")


def _reach(passed: list[Branch]) -> str:
    """Describe how often the examples reached the rule's branches, and which branches they missed."""
    if not passed:
        return NONE
    unreached = [branch for branch in passed if not branch.reached]
    lines = [f"not reached: {branch.where} is {'always' if branch.true else 'never'} true" for branch in unreached]
    return "\n".join([f"{len(passed)} branches, each reached {min(branch.reached for branch in passed)} times or more", *lines])


def describe(policy: Any, inputs: ClipInputs) -> str:
    """Format every input that the rule reads, one line per response. Masked tokens are shown as dashes."""
    from rlzoo.testing.check import inputs_read

    lines, more = [], dict[str, Any]()
    with suppress(Exception):  # a rule that raises an error has no result to compare
        more = inputs_read(policy, inputs)
    tensors = {f"; {name} ": values for name, values in more.items() if hasattr(values, "shape")}
    for row, mask in enumerate(inputs.response_mask[:SHOWN]):

        def shown(values: Tensor, form: str, row: int = row, mask: Tensor = mask) -> str:
            kept = mask.tolist() if values.shape[-1] == len(mask) else [True]
            return _cut([format(value, form) if keep else "-" for value, keep in zip(values[row].tolist(), kept, strict=True)])

        ratios = shown(inputs.log_probs - inputs.old_log_probs, "+.3g")
        others = "".join(name + shown(values, ".3g") for name, values in tensors.items())
        lines.append(f"  A = {shown(inputs.advantages, '+.3g')}: log-ratios {ratios}{others}")
    return "\n".join(lines + [f"  {name} = {value}" for name, value in more.items() if not hasattr(value, "shape")])


def _cut(words: list[str]) -> str:
    return " ".join([*words[:SHOWN], *(["..."] if len(words) > SHOWN else [])])
