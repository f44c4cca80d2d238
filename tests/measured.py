"""Rows of the response table for given inputs, as the learner measures them."""

import torch

from rlzoo.core.reductions import StepCounts
from rlzoo.learner.judge import judgement
from rlzoo.learner.on_policy import on_policy_gradient
from rlzoo.measure.response_table import ResponseTable


def table_of(policy, inputs, *, counts=None, group=None, entropy=None):
    """Evaluate a rule on whole inputs; each response has its own prompt unless ``group`` is given."""
    counts = counts or StepCounts.of(inputs.response_mask)
    judged = judgement(policy, inputs, counts)
    at_ratio_1 = on_policy_gradient(policy, inputs, judged.result, counts)
    group = torch.arange(len(inputs.log_probs)) if group is None else group
    return ResponseTable.measure(inputs, judged.result, judged.gradient, at_ratio_1, group=group, entropy=entropy)
