"""A clip policy on toy tensors: no model, no training, one screen."""

import torch

from rlzoo import ClipInputs, load_zoo

# three responses of 4, 16 and 64 tokens, every token 2 % likelier than it was, all of them right (A = 1)
length = torch.tensor([[4], [16], [64]])
response_mask = torch.arange(64) < length
old_log_probs = torch.full((3, 64), -1.0)
inputs = ClipInputs(
    log_probs=(old_log_probs + 0.02).requires_grad_(),
    old_log_probs=old_log_probs,
    advantages=torch.ones(3, 1),
    response_mask=response_mask,
)
for name, policy in load_zoo().items():
    result = policy()(inputs)
    share = torch.where(response_mask, result.clipped, False).sum(-1) / length[:, 0]
    if result.clipped.shape[1] == 1:
        share = result.clipped[:, 0].float()
    print(f"{name:5} clipped share of each response: {[round(value, 2) for value in share.tolist()]}")
