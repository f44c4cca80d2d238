"""Turn ratio: clips the geometric mean of the token ratios in each turn of a conversation."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class TurnRatio(ClipPolicy):
    """Clips the geometric mean of each turn's token ratios, so that a turn is kept or clipped as a whole.

    Formula:
        J = mean over responses of mean_t min(x_t A, clip(x_t, 1 - clip_low, 1 + clip_high) A)
        x_t = sg[exp(mean over the tokens k of t's turn of log(pi_k / pi_old_k))] pi_t / sg[pi_t]

    Where:
        A turn is the model's text between two messages of an environment. sg[.] stops the gradient, so that the gradient of
        each token is weighted by its own advantage. A = (R - mean) / std, with the mean and std of the rewards R in the group.

    Differences from GRPO:
        All tokens of a turn share one ratio. A single-turn response is clipped as in GSPO, but with a wider band.

    Reference:
        The per-segment ratio of ROLL (github.com/alibaba/ROLL), with its clip of 0.2. Workflow-R1, arXiv 2602.01202, uses
        this ratio too but averages over turns instead of tokens. A clip of 0.2 is usual for single tokens, but the mean over n
        tokens varies sqrt(n) times less. Narrow the band if nothing is clipped.
    """

    name = "turn-ratio"
    paper = "arXiv 2602.01202"
    scope = "token"
    needs: ClassVar = frozenset({"turn_ids"})
    watch: ClassVar = {
        "clip/fraction": "the share of tokens in clipped turns; the band is too wide if this is 0 for long turns",
        "clip/fraction_length_bin_<k>": "falls with length, because a mean over more tokens varies less",
    }

    clip_low: Annotated[float, Width()] = Field(0.2, gt=0, lt=1, description="the ratio stays above 1 - clip_low where A < 0")
    clip_high: Annotated[float, Width()] = Field(
        0.2, gt=0, le=100, description="the ratio stays below 1 + clip_high where A > 0"
    )

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each turn's mean log-ratio and return a ``(B, T)`` objective."""
        assert inputs.turn_ids is not None, "turn-ratio needs turn_ids: fill ClipInputs.turn_ids"
        token = ops.log_ratio(inputs)
        log_ratio = ops.turn_mean(token.detach(), inputs.turn_ids) + token - token.detach()
        band = ops.ratio_band(self.clip_low, self.clip_high, None, like=log_ratio)
        return ops.clipped_surrogate(log_ratio, inputs.advantages, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [TurnRatio]
