"""rlzoo's advantage estimation compared with TorchRL's, which gets the tokens that the model chose, row by row."""

import pytest
import torch
from rlzoo_advantages import GAE
from torchrl.objectives.value.functional import generalized_advantage_estimate

from tests.core.test_gae import episodes


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.7)])
@pytest.mark.parametrize("bootstraps", [False, True])
def test_advantages_and_value_targets_equal_torchrl(gamma, lam, bootstraps):
    for seed in range(4):
        inputs = episodes(seed)
        ours = GAE(gamma=gamma, lam=lam, bootstrap_truncated=bootstraps, whiten=False)
        advantages, targets = ours(inputs), ours.value_targets(inputs)
        for row, mask in enumerate(inputs.response_mask):
            if not mask.any():
                continue
            cut_off = bootstraps and not bool(inputs.finished[row])
            values, done = inputs.values[row][mask], torch.zeros(int(mask.sum()), dtype=torch.bool)
            paid = torch.zeros_like(values) if inputs.token_rewards is None else inputs.token_rewards[row][mask].clone()
            paid[-1] += 0.0 if cut_off else inputs.rewards[row, 0]
            done[-1] = True
            following = torch.cat([values[1:], inputs.last_values[row]])
            columns = (column[None, :, None] for column in (values, following, paid, done, done & (not cut_off)))
            expected = generalized_advantage_estimate(gamma, lam, *columns)
            for got, wanted in zip((advantages, targets), expected, strict=True):
                torch.testing.assert_close(got[row][mask], wanted[0, :, 0].float(), rtol=1e-5, atol=1e-5)
