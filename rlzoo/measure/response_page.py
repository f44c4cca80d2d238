"""Renders responses as an HTML page, colouring tokens by log-ratio or gradient weight and marking clipped tokens."""

from __future__ import annotations

import base64
import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.resources import files

from markupsafe import Markup, escape

from rlzoo.core.errors import printable
from rlzoo.measure.report import Cell, environment

EDGES = (0.003, 0.01, 0.03, 0.1, 0.3)
"""Absolute log-ratios in nats at which the colour gets stronger. They are fixed, so that pages can be compared."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a response."""

    text: str
    log_ratio: float | None = None  # None if the model did not choose the token
    clipped: bool = False
    special: bool = False  # whether it is a special token, such as the end of a sequence
    value: float | None = None  # the critic's value before the token; None without a critic
    weight: float | None = None  # gradient relative to ratio 1, which colours the token in place of the log-ratio


@dataclass(frozen=True, slots=True)
class ShownResponse:
    """A response with the rule's clip decisions in the last update that contained the response."""

    prompt: int  # number of the prompt within its step, from 1
    response: int  # number of the response among its prompt's responses, from 1
    question: str
    answer: str
    tokens: Sequence[Token]
    hidden: int  # number of further tokens that are not shown
    length: int  # number of tokens that the model chose
    finished: bool
    reward: float
    reward_parts: Mapping[str, float]  # named rewards, whose weighted sum is `reward`; empty if there are none
    advantage: float
    clipped: int  # number of clipped tokens
    judged: float  # log-ratio that the rule judged
    band: tuple[float, float] | None  # edges of the rule's band
    ceiling: float | None  # ceiling of the rule's dual clip, which applies where the advantage is negative
    update: int  # number of the update, from 1
    step: int | None = None  # None if the title gives the step
    weight: float = 1.0  # gradient as a multiple of that at ratio 1
    sides: Mapping[str, ShownResponse] = field(default_factory=dict)  # if a page shows several rules, the response under each

    @property
    def decision(self) -> str:
        """A short description of what was clipped."""
        if self.clipped in (0, self.length):
            return "whole response" if self.clipped else "no"
        return f"{self.clipped} of {self.length} tokens"


def render(title: str, facts: Mapping[str, str], responses: Sequence[ShownResponse]) -> str:
    """Render a self-contained HTML page with ``facts`` at the top. All input is escaped, and only the page's script can run."""
    values = [token.value for response in responses for token in response.tokens if token.value is not None]
    span = (min(values), max(values)) if values else (0.0, 0.0)
    pages = environment(token=partial(_token, span=span), plain=lambda text: printable(text, keep="\n"))
    script = files(__package__).joinpath("assets", "response_page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return str(
        pages.get_template("differences.html.j2" if responses and responses[0].sides else "response_page.html.j2").render(
            title=title,
            facts=facts,
            responses=responses,
            rows=[_row(response) for response in responses],
            edges=EDGES,
            span=span if values else None,
            script=Markup(script),
            digest=digest,
        )
    )


def shade(log_ratio: float | None) -> str:
    """Return a log-ratio's CSS class: ``p1`` to ``p5`` if the token has become more likely, ``n1`` to ``n5`` if less likely.

    Example:
        >>> shade(0.2), shade(-0.004), shade(0.0), shade(None)
        ('p4', 'n1', '', 'o')
    """
    if log_ratio is None:
        return "o"
    level = 0 if math.isnan(log_ratio) else bisect_right(EDGES, abs(log_ratio))
    return f"{'p' if log_ratio > 0 else 'n'}{level}" if level else ""


def _token(token: Token, span: tuple[float, float]) -> Markup:
    """Render a token, with its value relative to the page's ``span``. Newlines get a symbol to make their colours visible."""
    share = 0.0 if token.value is None or span[0] == span[1] else (token.value - span[0]) / (span[1] - span[0])
    level = "" if token.value is None else f"v{min(4, int(5 * share))}"
    colour = shade(token.log_ratio if token.weight is None else math.log(max(token.weight, 1e-9)))
    names = " ".join(name for name in (colour, "c" * token.clipped, "s" * token.special, level) if name)
    text = escape(printable(token.text, keep="\n\t").replace("\n", "↵\n"))
    kind = Markup(' class="{}"').format(names) if names else ""
    numbers = "" if token.log_ratio is None else f"{token.log_ratio:+.4f}"
    numbers += "" if token.value is None else f", value {token.value:.4g}"
    numbers += "" if token.weight is None else f", weight {token.weight:.3g}"
    title = Markup(' title="{}"').format(numbers) if numbers else ""
    return Markup("<i{}{}>{}</i>").format(kind, title, text)


def _row(response: ShownResponse) -> list[Cell]:
    """Return the cells of a response's table row."""
    share = response.clipped / response.length if response.length else 0.0
    measured = (response.reward, response.advantage, share, response.judged, response.band)
    return [response.prompt, response.response, *measured, response.length, response.update]
