"""The rule keeps the laws, and its gate has the numbers of its formula."""

import math

import pytest
import torch
from rlzoo_soft_gate import SoftGate

from rlzoo import ClipInputs
from rlzoo.testing import parametrize_with_checks

test_soft_gate_keeps_the_laws = parametrize_with_checks([SoftGate()])


def test_gate_on_a_hand_worked_number():
    # r = 2, A = 3, tau = 0.5: 3 * tanh(0.5) / 0.5 = 6 * 0.4621172 = 2.7727030
    old = torch.tensor([[-1.0]])
    inputs = ClipInputs(old + math.log(2), old, torch.tensor([[3.0]]), torch.tensor([[True]]))
    assert SoftGate()(inputs).objective.item() == pytest.approx(2.7727030, rel=1e-5)
