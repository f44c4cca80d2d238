"""A small model and an off-policy batch for our learner and other trainers, and the gradient of a step."""

import copy
import re
from pathlib import Path

import torch

from rlzoo import ClipPolicy
from tests.learner.test_learner import make_learner, relative_error

TOLERANCE = 1e-5  # relative L2 error of a gradient in float32
WIDTH = 30  # of the response tensors from `tests.off_policy.off_policy_batch`


def learner_gradient(model, policy, batch):
    """Return the gradient that our learner computes for one optimizer step on the whole batch."""
    learner = make_learner(model, policy)
    learner.accumulate(batch, torch.arange(len(batch)))
    return flat_gradient(learner.model)


def flat_gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def row_log_probs(model, sequence):
    """Return the log-prob of every token but the first, ``(N - 1,)``, with a gradient, in float32 and without our code."""
    logits = model(input_ids=sequence[None]).logits[0].float()
    return logits.log_softmax(-1)[:-1].gather(-1, sequence[1:, None])[:, 0]


def fresh(model):
    """Return a copy without gradients."""
    copied = copy.deepcopy(model)
    copied.zero_grad(set_to_none=True)
    return copied


def assert_same_gradient(got, expected):
    assert relative_error(got, expected) < TOLERANCE
    assert float(expected.norm()) > 0


def supported(zoo, given):
    """Return the names of the rules that a stateless trainer supports if it fills the fields ``given``."""
    return [name for name, rule in zoo.items() if rule.updated is ClipPolicy.updated and rule.needs <= set(given)]


def page_block(page, language="python"):
    """Return the first code block in the given language from a how-to page."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / page).read_text(encoding="utf-8")
    return re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]
