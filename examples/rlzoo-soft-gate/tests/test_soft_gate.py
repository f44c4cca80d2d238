"""Checks that the rule obeys the laws and that its gate matches its formula."""

import math

import pytest
import torch
from rlzoo_soft_gate import SoftGate

from rlzoo import ClipInputs
from rlzoo.testing import parametrize_with_checks

test_soft_gate_keeps_the_laws = parametrize_with_checks([SoftGate()])


def test_gate_on_a_hand_worked_number():
    # r = 2, A = 4, tau = 1: 4 * arctan(1) = pi
    old = torch.tensor([[-1.0]])
    inputs = ClipInputs(old + math.log(2), old, torch.tensor([[4.0]]), torch.tensor([[True]]))
    assert SoftGate()(inputs).objective.item() == pytest.approx(math.pi, rel=1e-5)
