"""Shows how much each rule of the zoo clips at short and long response lengths, without a model or training.

Run ``python examples/quickstart.py``, which takes a few seconds. The log-probability of every token changes by a random amount
with a standard deviation of 0.02, independently of other tokens. Over a response, the sum of these changes therefore typically
grows with the square root of the length, and their mean shrinks accordingly. A constant band on the sum (rloo) clips long
responses, and a constant band on the mean (gspo) clips short ones. A band that grows with the square root (fspo) clips all
lengths equally. Most rules that judge individual tokens clip nothing here, because no token has moved far enough. The tokens of
a real model are not independent, so measure your own model with ``rlzoo replay``.
"""

import torch

from rlzoo import ClipInputs, load_zoo
from rlzoo.testing.data import filled

LENGTHS = (16, 64, 256, 1024)  # in tokens
RESPONSES = 200  # number of responses per length; half are right (A = 1), and half are wrong (A = -1)

torch.manual_seed(0)
length = torch.tensor(LENGTHS).repeat_interleave(RESPONSES)[:, None]
response_mask = torch.arange(max(LENGTHS)) < length
old_log_probs = torch.full(response_mask.shape, -1.0)
inputs = ClipInputs(
    log_probs=(old_log_probs + 0.02 * torch.randn(response_mask.shape)).requires_grad_(),
    old_log_probs=old_log_probs,
    advantages=torch.tensor([[1.0], [-1.0]]).repeat(len(length) // 2, 1),
    response_mask=response_mask,
    rollout_log_probs=old_log_probs,
)

print("share clipped by each rule with its default settings, by response length in tokens")
print(f"{'rule':15}", *(f"{tokens:>6}" for tokens in LENGTHS))
for name, policy in load_zoo().items():
    clipped = policy()(filled(policy, inputs)).clipped  # `filled` adds groups, turns and other inputs that some rules need
    clipped = clipped.expand_as(response_mask) & response_mask  # (B, T), even for rules that clip whole responses
    share = clipped.sum(-1) / length[:, 0]
    print(f"{name:15}", *(f"{part.mean():6.2f}" for part in share.split(RESPONSES)))
