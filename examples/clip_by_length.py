"""What four rules would have clipped of one run's responses, by length, at one overall clip fraction: the README's picture.

    rlzoo train --clip gspo --output runs/gspo
    python examples/clip_by_length.py runs/gspo clip-by-length.svg

Every rule judges the same recorded log-probs (`rlzoo replay` does the same), its widths scaled until it clips a tenth of all
responses with an advantage; of the tokens, for grpo. Bars are 95 % intervals over prompts. ``lre_max`` is printed beside its
noise: what so many prompts would give if every length were clipped alike.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl

from rlzoo import load_zoo
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.study import study
from rlzoo.measure.figures import Series, profile

RULES = ("fspo", "gspo", "grpo", "rloo")
FRACTION = 0.1


def main() -> None:
    """Replay, print, draw."""
    path, target = Path(sys.argv[1]), Path(sys.argv[2])
    run = RecordedRun.read(path)
    zoo = load_zoo()
    replayed = study(run, [zoo[name]() for name in RULES], match=FRACTION, with_cosine=False)
    series = {}
    print(f"{'rule':6} {'clipped':>8} {'lre_max':>8} {'low':>6} {'high':>6} {'noise':>6}  by length, short to long")
    for rule in replayed.rules:
        found = rule.replayed.profile
        both, (low, high) = found.both, found.lre_max_interval
        series[rule.label] = Series(x=found.median_length, y=both.fraction, low=both.low, high=both.high)
        numbers = f"{found.clip_fraction:8.3f} {found.lre_max:8.3f} {low:6.3f} {high:6.3f} {found.lre_noise:6.3f}"
        print(f"{rule.label:6} {numbers}  {' '.join(f'{share:.3f}' for share in both.fraction)}")
    print(f"{sum(both.count):,} responses with an advantage, median lengths {found.median_length}")
    figure = profile(series, title=f"responses of a run of {run.trained_with}, every rule clipping {FRACTION:.0%}")
    figure.axes[0].axhline(FRACTION, color="0.4", linestyle=":", linewidth=1)  # what a fair rule would do
    mpl.rcParams["svg.hashsalt"] = "rlzoo"  # the same numbers give the same file
    figure.savefig(target, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
