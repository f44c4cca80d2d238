"""The tensors for both sides, and rlzoo's results: a loss and its gradient with respect to every log-prob."""

import dataclasses

import torch

from rlzoo.core.reductions import StepCounts, reduce_objective
from rlzoo.testing import off_policy_inputs

TOLERANCE = 2e-6  # rlzoo computes in float32, the other libraries here in float64
MAX_LENGTH = 40


def shared_inputs(policy, seed=0):
    """Return ragged, off-policy inputs with every sixth advantage 0, shifted so that every probability is below 1."""
    inputs = off_policy_inputs(policy, seed=seed, max_length=MAX_LENGTH)
    shift = inputs.log_probs.max().clamp(min=0) + 0.01
    names = ("log_probs", "old_log_probs", "rollout_log_probs")
    return dataclasses.replace(inputs, **{name: getattr(inputs, name) - shift for name in names})


def clipped_share(policy, inputs):
    """Return the share of the tokens with a nonzero advantage at which the rule acted."""
    tokens = inputs.response_mask & (inputs.advantages != 0)
    return policy(inputs).clipped.expand(tokens.shape)[tokens].float().mean().item()


def ours(policy, inputs, counts=None, max_length=MAX_LENGTH):
    """Return the loss to be minimised and its gradient, float64; ``counts`` are those of the inputs unless given."""
    log_probs = inputs.log_probs.float().detach().clone().requires_grad_()
    mask = inputs.response_mask
    counts = counts or StepCounts(int(mask.any(-1).sum()), int(mask.sum()))
    result = policy(dataclasses.replace(inputs, log_probs=log_probs))
    loss = -reduce_objective(result.objective, mask, policy.reduction, counts, max_length)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return loss.item(), gradient.double()


def difference(theirs, ours):
    """Return relative differences: of the losses, to the sum of gradient magnitudes; of the gradients, to the largest entry.

    A loss is a sum of terms of both signs that may cancel, so its own size says nothing about rounding.
    """
    (loss, gradient), (our_loss, our_gradient) = theirs, ours
    size = gradient.abs().sum().item()
    by_gradient = (gradient - our_gradient).abs().max().item() / gradient.abs().max().item()
    return abs(loss - our_loss) / max(size, abs(loss)), by_gradient


def assert_agree(theirs, ours, tolerance=TOLERANCE):
    by_loss, by_gradient = difference(theirs, ours)
    assert by_loss < tolerance, f"losses {theirs[0]:.9g} and {ours[0]:.9g}"
    assert by_gradient < tolerance, f"gradients differ by {by_gradient:.2g} of the largest"
