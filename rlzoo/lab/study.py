"""A replay study: several rules on one run's rollouts, as they are, at one clip fraction, or over a range of widths."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from rlzoo.errors import UserError
from rlzoo.lab.cosine import Cosine, cosines, has_weights
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import Replayed, clip_fraction_of, match_clip_fraction, replay
from rlzoo.policy import ClipPolicy

FACTORS = tuple(2.0**power for power in range(-4, 5))
"""Widths of a sweep, relative to the setting at hand."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What one rule did with the rollouts.

    Example:
        ``rule.replayed.profile.clip_fraction``
    """

    label: str
    replayed: Replayed
    cosine: Cosine | None  # None where the run kept no weights
    note: str = ""  # why its clip fraction was not matched


@dataclass(frozen=True, slots=True)
class WidthPoint:
    """One rule at one width.

    Example:
        ``WidthPoint(factor=2.0, ...)``: twice the width.
    """

    factor: float
    widths: Mapping[str, float]
    clip_fraction: float
    lre_max: float | None
    lre_noise: float | None
    ess: float
    cosine: float | None


@dataclass(frozen=True, slots=True)
class Study:
    """Rules on one run.

    Example:
        ``study(run, policies, match=0.1).rules[0].replayed.profile.lre_max``
    """

    run: RecordedRun
    rules: tuple[Rule, ...]
    match: float | None
    skip_steps: int
    sweep: Mapping[str, tuple[WidthPoint, ...]]

    def as_dict(self) -> dict[str, Any]:
        """As plain JSON; numbers that are not known are null."""
        rules = [
            {
                "policy": rule.label,
                "settings": rule.replayed.policy.model_dump(mode="json"),
                "note": rule.note,
                "profile": asdict(rule.replayed.profile),
                "cosine": None if rule.cosine is None else asdict(rule.cosine),
            }
            for rule in self.rules
        ]
        sweep = {label: [asdict(point) for point in points] for label, points in self.sweep.items()}
        about = {
            "run": str(self.run.path),
            "run_policy": self.run.config.clip.name,
            "num_responses": self.run.num_responses,
            "matched_clip_fraction": self.match,
            "skip_steps": self.skip_steps,
        }
        return dict(plain({**about, "rules": rules, "sweep": sweep}))


Told = Callable[[str, int, int], None]
"""Told what is being done, how much of it is done and how much there is."""


def study(
    run: RecordedRun,
    policies: Sequence[ClipPolicy],
    *,
    match: float | None = None,
    skip_steps: int = 0,
    sweep_width: bool = False,
    with_cosine: bool = True,
    told: Told = lambda what, done, total: None,
) -> Study:
    """Replay rules on a run.

    Args:
        run: the recording.
        policies: the rules with their settings, of different names.
        match: clip fraction to scale every rule's widths to; a rule without a width stays as it is, with a note.
        skip_steps: steps at the beginning that nothing is reported of.
        sweep_width: also every rule that has a width at each of `FACTORS` times its width.
        with_cosine: measure the angle to the unclipped gradient, if the run kept weights.
        told: for progress.
    """
    fraction = clip_fraction_of(run, skip_steps)
    matched: dict[str, tuple[ClipPolicy, str]] = {}
    for number, policy in enumerate(policies):
        told("matching" if match else "replaying", number, len(policies))
        matched[policy.name] = _matched(policy, match, fraction)
    candidates = {name: replay(run, policy, skip_steps) for name, (policy, _) in matched.items()}
    points: dict[tuple[str, float], Replayed] = {}
    for number, (name, (policy, _)) in enumerate(matched.items()):
        told("replaying widths", number, len(matched))
        points |= _widths(run, name, policy, skip_steps) if sweep_width else {}
    edges = next(iter(candidates.values())).profile.edges
    measured: dict[str, Cosine] = {}
    if with_cosine and has_weights(run):
        everything = candidates | {f"{name} x{factor}": replayed for (name, factor), replayed in points.items()}
        measured = cosines(run, everything, edges, lambda done, total: told("cosine", done, total))
    rules = tuple(Rule(name, replayed, measured.get(name), matched[name][1]) for name, replayed in candidates.items())
    sweep = {
        name: tuple(
            _point(factor, replayed, measured.get(f"{name} x{factor}"))
            for (label, factor), replayed in points.items()
            if label == name
        )
        for name in dict.fromkeys(label for label, _ in points)
    }
    return Study(run, rules, match, skip_steps, sweep)


def _matched(policy: ClipPolicy, match: float | None, fraction: Callable[[ClipPolicy], float]) -> tuple[ClipPolicy, str]:
    if match is None:
        return policy, ""
    try:
        return match_clip_fraction(policy, match, fraction), ""
    except UserError as error:
        return policy, str(error)


def _widths(run: RecordedRun, name: str, policy: ClipPolicy, skip_steps: int) -> dict[tuple[str, float], Replayed]:
    """The rule at every width it can have; nothing for one without a width, or that finds it itself."""
    found: dict[tuple[str, float], Replayed] = {}
    for factor in FACTORS if policy.width_fields() and not policy.is_adaptive else ():
        try:
            scaled = policy.scaled(factor)
        except ValidationError:  # below what its field allows
            continue
        found[name, factor] = replay(run, scaled, skip_steps)
    return found


def _point(factor: float, replayed: Replayed, cosine: Cosine | None) -> WidthPoint:
    policy, profile = replayed.policy, replayed.profile
    return WidthPoint(
        factor,
        widths_of(policy),
        profile.clip_fraction,
        profile.lre_max,
        profile.lre_noise,
        profile.ess,
        None if cosine is None else cosine.mean,
    )


def widths_of(policy: ClipPolicy) -> dict[str, float]:
    """The widths of a policy that are set."""
    return {name: value for name in policy.width_fields() if (value := getattr(policy, name)) is not None}


def plain(value: Any) -> Any:
    """JSON without NaN, which it does not know."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
