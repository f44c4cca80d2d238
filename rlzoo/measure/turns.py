"""How evenly a rule clips the turns of episodes, and episodes of few turns and of many."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rlzoo.fairness import NUM_BINS, bin_edges, bin_index
from rlzoo.measure.intervals import Clusters, Reweighting
from rlzoo.measure.profile import clusters, labels
from rlzoo.measure.response_table import ResponseTable


@dataclass(frozen=True, slots=True)
class Evenness:
    """Clip fractions of six bins, and the reweighting error over them."""

    fraction: tuple[float, ...]  # NaN where a bin is empty
    worst: Reweighting | None  # lre_max; None where everything is clipped
    mean: Reweighting | None

    @classmethod
    def of(cls, found: Clusters) -> Evenness:
        """Of clip decisions added up by prompt and bin."""
        count, clipped = found.count.sum(0), found.clipped.sum(0)
        fraction = (float(clipped[k] / count[k]) if count[k] > 0 else math.nan for k in range(NUM_BINS))
        worst, mean = found.reweighting() or (None, None)
        return cls(tuple(fraction), worst, mean)


@dataclass(frozen=True, slots=True)
class TurnProfile:
    """The fairness of a rule over turns, from the episodes with a non-zero advantage.

    A turn's clip fraction is that of its tokens. A rule that judges whole responses cuts all turns of an episode alike.
    """

    by_turn: Evenness  # bin k holds the tokens of turn k + 1; the last bin, those of all turns from there on
    by_number: Evenness  # episodes, in quantile bins of their number of turns
    edges: tuple[float, ...]  # (K + 1,) of those bins, in turns

    @classmethod
    def of(cls, table: ResponseTable) -> TurnProfile | None:
        """The profile of pooled rows; None where every response is one turn, or none has an advantage."""
        rows = table.judged()
        if len(rows.turns) == 0 or int(rows.turns.max()) == 1:
            return None
        tokens, clipped = rows.turn_tokens.double().numpy(), rows.turn_clipped.double().numpy()
        edges = bin_edges(rows.turns)
        return cls(
            by_turn=Evenness.of(Clusters.add_up(tokens, clipped, rows.group.numpy())),
            by_number=Evenness.of(clusters(rows, bin_index(rows.turns, edges))),
            edges=tuple(edges.tolist()),
        )

    def bin_labels(self) -> list[str]:
        """The numbers of turns that each bin of `by_number` holds, such as ``"4-6"``."""
        return labels(self.edges)

    def metrics(self) -> dict[str, float]:
        """The profile by its metric names, without unknown values."""
        found = {f"clip/fraction_turn_{k + 1}": value for k, value in enumerate(self.by_turn.fraction)}
        found |= {f"clip/fraction_num_turns_bin_{k}": value for k, value in enumerate(self.by_number.fraction)}
        found |= {f"clip/num_turns_bin_{k}_edge": self.edges[k + 1] for k in range(NUM_BINS)}
        for kind, evenness in (("turn", self.by_turn), ("num_turns", self.by_number)):
            for end, error in (("max", evenness.worst), ("mean", evenness.mean)):
                if error is not None:
                    name = f"fairness/lre_{kind}_{end}"
                    found[name] = error.value
                    if error.interval is not None:
                        found[f"{name}_ci_low"], found[f"{name}_ci_high"] = error.interval
        return {name: value for name, value in found.items() if not math.isnan(value)}
