"""CTPO: clips the cumulative ratio of each prefix to a band that grows with the length of the prefix."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from rlzoo import ClipBand, ClipInputs, ClipPolicy, ClipResult, Width, hookimpl, ops


class CTPO(ClipPolicy):
    """Weights each token by the product of the ratios up to and including its own, clipped to a band that grows with position.

    Formula:
        J = mean over responses of mean_t min(x_t A, clip(x_t, exp(-width_low t^power), exp(width_high t^power)) A)
        x_t = sg[rho_t] pi_t / sg[pi_t],   log rho_t = sum_{k <= t} log(pi_k / pi_old_k)

    Where:
        t = 1, 2, ... counts the model's tokens, and sg[.] stops the gradient. x_t equals rho_t, but its gradient comes only
        from token t. A = (R - mean) / std, with the mean and std of the rewards R in the group.

    Differences from GRPO:
        A token is weighted by the ratio of the whole prefix that ends with it, which is the importance ratio of the state
        and the token together. The band widens with the standard deviation of a sum of t token log-ratios, which grows as
        t^(1/2) if the log-ratios are independent.

    Reference:
        Cumulative Token Policy Optimization, arXiv 2605.07331, with widths of 0.025 and 0.05 and a power of 0.5, as in the
        paper. In the paper's formula, rho_t is a function of the current policy. Here, the prefix is treated as constant, as
        in the released code. The released code also has a dual clip, exp(0.05 t^power) where A < 0 (`width_ceiling`), and
        averages over all tokens.
    """

    name = "ctpo"
    paper = "arXiv 2605.07331"
    scope = "token"
    watch: ClassVar = {
        "clip/fraction_length_bin_<k>": "flat at the right `power`; increase it if the fraction rises with length",
        "ratio/sigma_token": "a width of about this value clips about a sixth of the tokens at every position",
    }

    width_low: Annotated[float, Width()] = Field(
        0.025, gt=0, le=100, description="the cumulative log-ratio stays above -width_low t^power where A < 0"
    )
    width_high: Annotated[float, Width()] = Field(
        0.05, gt=0, le=100, description="the cumulative log-ratio stays below width_high t^power where A > 0"
    )
    width_ceiling: Annotated[float | None, Width()] = Field(
        None, gt=0, le=100, description="dual clip where A < 0: ceiling of the log-ratio per t^power; null for none"
    )
    power: float = Field(0.5, ge=0, le=2, description="exponent of the token's position t: the band grows as t^power")

    def __call__(self, inputs: ClipInputs) -> ClipResult:
        """Clip each prefix and return a ``(B, T)`` objective."""
        log_ratio = ops.log_ratio(inputs)
        prefix = ops.prefix_sum(log_ratio.detach(), inputs.response_mask)
        growth = ops.positions(inputs.response_mask) ** self.power
        ceiling = None if self.width_ceiling is None else self.width_ceiling * growth
        band = ClipBand(-self.width_low * growth, self.width_high * growth, ceiling)
        return ops.clipped_surrogate(prefix + log_ratio - log_ratio.detach(), inputs.advantages, band)


@hookimpl
def rlzoo_clip_policies() -> list[type[ClipPolicy]]:
    """Return the rules of this plugin."""
    return [CTPO]
