"""Measures how evenly a rule clips the turns of an episode and episodes with different numbers of turns."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlzoo.core.fairness import NUM_BINS, bin_edges, bin_index
from rlzoo.measure.intervals import Clusters, LengthError
from rlzoo.measure.profile import clusters, error_metrics
from rlzoo.measure.response_table import ResponseTable


@dataclass(frozen=True, slots=True)
class Evenness:
    """The clip fractions of six bins and the reweighting error across the bins."""

    fraction: tuple[float, ...]  # NaN for an empty bin
    lre: LengthError | None  # conditional on the sign of the advantage; None if everything is clipped

    @classmethod
    def of(cls, decisions: Clusters) -> Evenness:
        """Compute the evenness from clip decisions summed by prompt and bin."""
        count, clipped = decisions.count.sum((0, 2)), decisions.clipped.sum((0, 2))
        fraction = (float(clipped[k] / count[k]) if count[k] > 0 else math.nan for k in range(NUM_BINS))
        errors = decisions.reweighting()
        return cls(tuple(fraction), errors.conditional if errors else None)


@dataclass(frozen=True, slots=True)
class TurnProfile:
    """The fairness of a rule across turns, measured on episodes with a nonzero advantage.

    A turn's clip fraction is the clipped share of its tokens. A rule that judges whole responses clips all turns of an
    episode equally.
    """

    by_turn: Evenness  # bin k holds the tokens of turn k + 1; the last bin pools all later turns
    by_number: Evenness  # episodes, grouped into quantile bins by number of turns
    edges: tuple[float, ...]  # (K + 1,) edges of the `by_number` bins, in turns

    @classmethod
    def of(cls, table: ResponseTable) -> TurnProfile | None:
        """Compute the profile of pooled rows, or return None if all responses have one turn or all advantages are 0."""
        rows = table.judged()
        if len(rows.turns) == 0 or int(rows.turns.max()) == 1:
            return None
        tokens, clipped = rows.turn_tokens.double().numpy(), rows.turn_clipped.double().numpy()
        edges = bin_edges(rows.turns)
        positive = (rows.advantage > 0).numpy()
        return cls(
            by_turn=Evenness.of(Clusters.add_up(tokens, clipped, rows.group.numpy(), positive)),
            by_number=Evenness.of(clusters(rows, bin_index(rows.turns, edges))),
            edges=tuple(edges.tolist()),
        )

    def metrics(self) -> dict[str, float]:
        """Return the profile as metrics by name, omitting unknown values."""
        metrics = {f"clip/fraction_turn_{k + 1}": value for k, value in enumerate(self.by_turn.fraction)}
        metrics |= {f"clip/fraction_num_turns_bin_{k}": value for k, value in enumerate(self.by_number.fraction)}
        metrics |= {f"clip/num_turns_bin_{k}_edge": self.edges[k + 1] for k in range(NUM_BINS)}
        for kind, evenness in (("turn", self.by_turn), ("num_turns", self.by_number)):
            if evenness.lre is not None:
                metrics |= {
                    name: value
                    for name, value in error_metrics(f"fairness/lre_{kind}", evenness.lre).items()
                    if not name.endswith("_corrected")
                }
        return {name: value for name, value in metrics.items() if not math.isnan(value)}
