"""Properties of the tensor functions for every batch: ragged, padded anywhere, any length, with extreme ratios."""

import math
from dataclasses import dataclass

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlzoo import ClipBand, ClipInputs, ops

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)
LONGEST = 8192
POISONS = (float("nan"), float("inf"), float("-inf"))
LARGEST_STEPS = 800  # of a token's log-ratio; 800 / 16 = 50 nats


@dataclass(frozen=True)
class Batch:
    """A batch that is described by a few numbers, so that a failure is readable.

    Log-ratios are multiples of a power of two, few enough that every sum over a response is exact in float32. The position of a
    token and the order of a sum therefore cannot change a decision.
    """

    rows: tuple[tuple[int, float], ...]  # length and advantage of each response
    step: float = 1 / 16  # log-ratios are multiples of it, at most LARGEST_STEPS: 50, 1.6 or 0.05 nats
    push: int = 0  # sign of every log-ratio; 0 for both signs
    spare: int = 0  # columns beyond the longest response
    reported: bool = True  # whether the sampler reported its own log-probabilities
    by_token: bool = False  # whether advantages differ by token
    seed: int = 0

    def inputs(self, padding: str = "right", fill: float = -1.0) -> ClipInputs:
        """Return the tensors, with padding right, left or scattered between the tokens, and ``fill`` in the padding."""
        lengths = [length for length, _ in self.rows]
        longest, width = max(lengths), max(1, max(lengths) + self.spare)
        shape = (len(lengths), longest)
        rng = torch.Generator().manual_seed(self.seed)
        steps = torch.randint(-LARGEST_STEPS, LARGEST_STEPS + 1, shape, generator=rng)
        log_ratio = (self.push * steps.abs() if self.push else steps) * self.step
        likelier = -torch.randint(0, 128, shape, generator=rng) / 16  # the larger of old and new: no log-probability above 0
        old = likelier - log_ratio.clamp(min=0)
        columns = {"log_probs": old + log_ratio, "old_log_probs": old}
        if self.reported:
            columns["rollout_log_probs"] = old - torch.randint(0, 3, shape, generator=rng) * self.step
        places = [self._places(padding, length, width) for length in lengths]
        mask = torch.zeros(len(lengths), width, dtype=torch.bool)
        for row, place in enumerate(places):
            mask[row, place] = True

        def laid_out(values: torch.Tensor) -> torch.Tensor:
            out = torch.full((len(lengths), width), fill)
            for row, place in enumerate(places):
                out[row, place] = values[row, : len(place)]
            return out

        advantages = torch.tensor([[advantage] for _, advantage in self.rows])
        if self.by_token:
            share = torch.tensor([1.0, 0.5, 0.0, -1.0])[torch.randint(0, 4, shape, generator=rng)]
            advantages = torch.where(mask, laid_out(share), 0.0) * advantages
        return ClipInputs(advantages=advantages, response_mask=mask, **{k: laid_out(v) for k, v in columns.items()})

    @staticmethod
    def _places(padding: str, length: int, width: int) -> torch.Tensor:
        if padding == "scattered":
            own = torch.Generator().manual_seed(length)  # not the batch's generator, so that the tokens stay the same
            return torch.randperm(width, generator=own)[:length].sort().values
        start = width - length if padding == "left" else 0
        return torch.arange(start, start + length)


ADVANTAGES = st.sampled_from([1.0, -1.0, 0.0, 0.37, -2.5, 1e6, -1e6, 1e-30, -1e-30])
LENGTHS = st.one_of(st.sampled_from([0, 1, 2, LONGEST]), st.integers(1, 64), st.integers(1, LONGEST))
BATCHES = st.builds(
    Batch,
    rows=st.lists(st.tuples(LENGTHS, ADVANTAGES), min_size=1, max_size=4).map(tuple),
    step=st.sampled_from([2**-4, 2**-9, 2**-14]),
    push=st.sampled_from([-1, 0, 1]),
    spare=st.sampled_from([0, 1, 7]),
    reported=st.booleans(),
    seed=st.integers(0, 10_000),
)
EXTREME = Batch(rows=((LONGEST, 1e6), (LONGEST, -1e6), (1, 0.0), (0, 1.0)), push=1, spare=1)


@SETTINGS
@given(batch=BATCHES, poison=st.sampled_from(POISONS), padding=st.sampled_from(["right", "left", "scattered"]))
@example(batch=EXTREME, poison=float("nan"), padding="left")
@example(batch=Batch(rows=((0, 1.0),)), poison=float("inf"), padding="right")
def test_log_ratio_is_zero_at_masked_positions_with_any_content(batch, poison, padding):
    inputs, clean = batch.inputs(padding, fill=poison), batch.inputs(padding)
    mask = inputs.response_mask
    log_probs = inputs.log_probs.requires_grad_()
    for against in ("old", "rollout"):
        log_ratio = ops.log_ratio(inputs, against)
        assert (log_ratio[~mask] == 0).all()
        assert torch.equal(log_ratio, ops.log_ratio(clean, against))
        (gradient,) = torch.autograd.grad(log_ratio.sum(), log_probs)
        assert torch.equal(gradient, mask.float())


@SETTINGS
@given(batch=BATCHES)
@example(batch=EXTREME)
def test_log_ratio_to_the_sampler_falls_back_to_the_old_log_probs(batch):
    inputs = batch.inputs()
    assert inputs.rollout_log_probs is None or ops.log_ratio(inputs, "rollout").ge(ops.log_ratio(inputs)).all()
    if inputs.rollout_log_probs is None:
        assert torch.equal(ops.log_ratio(inputs, "rollout"), ops.log_ratio(inputs))


@SETTINGS
@given(batch=BATCHES)
@example(batch=EXTREME)
def test_mean_times_length_is_the_sum(batch):
    inputs = batch.inputs()
    log_ratio, mask = ops.log_ratio(inputs), inputs.response_mask
    total, lengths = ops.sequence_sum(log_ratio, mask), ops.lengths(mask)
    assert lengths.flatten().tolist() == [max(1, length) for length, _ in batch.rows]
    torch.testing.assert_close(ops.sequence_mean(log_ratio, mask) * lengths, total, rtol=1e-6, atol=0)
    assert torch.equal(total[:, 0], log_ratio.double().sum(-1).float())  # multiples of a step need no rounding


@SETTINGS
@given(batch=BATCHES, padding=st.sampled_from(["left", "scattered"]), poison=st.sampled_from(POISONS))
@example(batch=EXTREME, padding="left", poison=float("nan"))
def test_the_padding_side_changes_no_sum(batch, padding, poison):
    right, other = batch.inputs(), batch.inputs(padding, fill=poison)
    for values in ("log_probs", "old_log_probs"):
        first, second = getattr(right, values), getattr(other, values)
        assert torch.equal(first[right.response_mask], second[other.response_mask])
    for pool in (ops.sequence_sum, ops.sequence_mean):
        first, second = (pool(ops.log_ratio(inputs), inputs.response_mask) for inputs in (right, other))
        assert torch.equal(first, second)
        assert torch.equal(first, pool(other.log_probs - other.old_log_probs, other.response_mask))


@SETTINGS
@given(batch=BATCHES, poison=st.sampled_from(POISONS))
@example(batch=EXTREME, poison=float("nan"))
@example(batch=Batch(rows=((0, 1.0), (0, 1.0))), poison=float("inf"))
def test_step_mean_is_the_mean_of_every_response_token(batch, poison):
    inputs = batch.inputs(fill=poison)
    seen = inputs.log_probs[inputs.response_mask].double()
    expected = seen.mean().item() if len(seen) else 0.0
    assert math.isclose(ops.step_mean(inputs.log_probs, inputs.response_mask).item(), expected, rel_tol=1e-5)


@SETTINGS
@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=20))
@example(values=[20.0, -20.0, 20.000002, float("inf"), float("-inf"), 3.4e38])
def test_limited_exp_is_exp_up_to_twenty_and_constant_beyond(values):
    log_ratio = torch.tensor(values, requires_grad=True)
    ratio = ops.limited_exp(log_ratio)
    (gradient,) = torch.autograd.grad(ratio.sum(), log_ratio)
    inside = log_ratio.detach().abs() <= ops.LOG_RATIO_LIMIT
    edges = torch.tensor([-ops.LOG_RATIO_LIMIT, ops.LOG_RATIO_LIMIT]).exp()  # 2.1e-9 and 4.9e8
    assert ratio.ge(edges[0]).all()
    assert ratio.le(edges[1]).all()
    torch.testing.assert_close(ratio[inside], log_ratio[inside].exp())
    torch.testing.assert_close(gradient, torch.where(inside, ratio.detach(), 0.0))


WIDTHS = st.floats(1e-6, 5.0)


def surrogates(batch, low, high, ceiling):
    """Return our surrogate, the textbook's, and their gradients in float64: by token, NaN where the textbook has none."""
    inputs = batch.inputs()
    log_ratio = ops.log_ratio(inputs).double()
    advantages = inputs.advantages.double().expand_as(log_ratio)
    edges = [torch.tensor(edge, dtype=torch.float64) for edge in (-low, high)]
    band = ClipBand(*edges, None if ceiling is None else edges[1] + ceiling)
    first, second = log_ratio.clone().requires_grad_(), log_ratio.clone().requires_grad_()
    clamped, clipped = ops.clamp_by_advantage(first, advantages, band)
    ours = clamped.exp() * advantages
    ratio = second.exp()
    textbook = torch.minimum(ratio * advantages, ratio.clamp(band.low.exp(), band.high.exp()) * advantages)
    if band.ceiling is not None:
        textbook = torch.where(advantages < 0, textbook.maximum(band.ceiling.exp() * advantages), textbook)
    gradients = [torch.autograd.grad(value.sum(), leaf)[0] for value, leaf in ((ours, first), (textbook, second))]
    return inputs, band, log_ratio, advantages, clamped.detach(), clipped, (ours.detach(), textbook.detach()), gradients


@SETTINGS
@given(batch=BATCHES, low=WIDTHS, high=WIDTHS, ceiling=st.none() | WIDTHS)
@example(batch=EXTREME, low=0.2, high=0.2, ceiling=None)
@example(batch=EXTREME, low=0.2, high=0.2, ceiling=1.0)
def test_the_clamp_equals_the_textbook_clip_of_the_ratio(batch, low, high, ceiling):
    _, band, log_ratio, _, clamped, _, values, gradients = surrogates(batch, low, high, ceiling)
    (ours, textbook), (our_gradient, textbook_gradient) = values, gradients
    inside = clamped.abs() < ops.LOG_RATIO_LIMIT  # beyond it, the textbook's ratio continues to infinity
    torch.testing.assert_close(ours[inside], textbook[inside], rtol=1e-12, atol=0)
    for edge in (band.low, band.high, band.ceiling):
        if edge is not None:
            inside &= log_ratio != edge  # on an edge itself, the gradient of a minimum is arbitrary
    torch.testing.assert_close(our_gradient[inside], textbook_gradient[inside], rtol=1e-12, atol=0)
    assert ours.isfinite().all()
    assert our_gradient.isfinite().all()


@SETTINGS
@given(batch=BATCHES, low=WIDTHS, high=WIDTHS, ceiling=st.none() | WIDTHS)
@example(batch=EXTREME, low=0.2, high=0.2, ceiling=1.0)
def test_a_log_ratio_is_clipped_only_in_the_direction_of_its_advantage(batch, low, high, ceiling):
    _, band, log_ratio, advantages, clamped, clipped, _, (gradient, _) = surrogates(batch, low, high, ceiling)
    assert not clipped[advantages == 0].any()
    assert (log_ratio[clipped & (advantages > 0)] > band.high).all()
    fallen, risen = log_ratio < band.low, log_ratio > (math.inf if band.ceiling is None else band.ceiling)
    assert (fallen | risen)[clipped & (advantages < 0)].all()
    limited = log_ratio.abs() > ops.LOG_RATIO_LIMIT
    assert torch.equal(clipped | limited | (advantages == 0), (gradient == 0) | limited)
    assert torch.equal(clamped[~clipped], log_ratio[~clipped].clamp(-20, 20))
    assert (clamped.abs() <= 20).all()


@SETTINGS
@given(batch=BATCHES)
@example(batch=EXTREME)
def test_without_a_band_nothing_is_clipped(batch):
    inputs = batch.inputs()
    result = ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)
    assert not result.clipped.any()
    assert result.objective.isfinite().all()
    assert torch.equal(result.objective, ops.limited_exp(result.log_ratio) * inputs.advantages)


@SETTINGS
@given(
    clip_low=st.floats(0.0, 0.999), clip_high=st.floats(0.0, 100.0), dual_clip=st.none() | st.floats(1.001, 1e6)
)  # the bounds of the policies' own fields
@example(clip_low=3e-4, clip_high=4e-4, dual_clip=None)
def test_the_edges_of_a_ratio_band_are_those_of_the_ratio(clip_low, clip_high, dual_clip):
    band = ops.ratio_band(clip_low, clip_high, dual_clip, like=torch.zeros(1))
    assert band.low.dtype == torch.float32
    assert math.isclose(math.exp(band.low), 1 - clip_low, rel_tol=1e-6)
    assert math.isclose(math.exp(band.high), 1 + clip_high, rel_tol=1e-6)
    assert band.low <= 0 <= band.high
    assert (band.ceiling is None) == (dual_clip is None)
    if dual_clip is not None:
        assert math.isclose(math.exp(band.ceiling), dual_clip, rel_tol=1e-5)
