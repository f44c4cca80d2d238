"""The rule keeps the laws, and its gate has the paper's numbers."""

import math

import pytest
import torch
from rlzoo_sapo import SAPO

from rlzoo import ClipInputs
from rlzoo.testing import parametrize_with_checks

test_sapo_keeps_the_laws = parametrize_with_checks([SAPO()])


def test_gate_on_a_hand_worked_number():
    # r = 1.5, A = 2, tau = 1: 2 * 4 * sigmoid(0.5) = 8 * 0.6224593 = 4.979675
    old = torch.tensor([[-1.0]])
    inputs = ClipInputs(old + math.log(1.5), old, torch.tensor([[2.0]]), torch.tensor([[True]]))
    assert SAPO()(inputs).objective.item() == pytest.approx(4.979675, rel=1e-5)
