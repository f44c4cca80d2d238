"""The page of differences shows first what only one of two rules clips, with each rule's gradient weights."""

import math

import torch

from rlzoo import load_zoo, replay
from rlzoo.journal.rollout_file import RolloutFile
from rlzoo.lab.differences import differences_page
from tests.training.test_response_page import Page

LOG_RATIOS = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.2, -0.2, 0.1, -0.1], [0.15, 0.15, 0.15, 0.15]])
"""By response. A band of 1.2 ends at 0.182, so a rule for tokens clips the first token of the second response, and a rule
for responses, whose sums are 0, 0 and 0.6, clips the third."""


def test_a_response_that_only_one_rule_clips_comes_first(tmp_path):
    old, ones = torch.full((3, 4), -2.0), torch.ones(3, 4)
    step = RolloutFile.from_padded(
        1, torch.tensor([[7]] * 3), ones[:, :1], torch.arange(20, 32).view(3, 4), ones, torch.tensor([0, 0, 1]),
        updates=[(torch.arange(3), old + LOG_RATIOS)], old_log_probs=old, advantages=torch.ones(3), rewards=torch.ones(3),
    )  # fmt: skip
    step.save(tmp_path / "000001.safetensors")
    zoo, band = load_zoo(), {"clip_low": 0.2, "clip_high": 0.2}
    text = differences_page(replay(tmp_path, [zoo["grpo"](**band), zoo["rloo"](**band)]))
    page = Page(text)
    assert page.headings == [
        "Step 1, prompt 2, response 1clipped: noclipped: whole response",
        "Step 1, prompt 1, response 2clipped: 1 of 4 tokensclipped: no",
        "Step 1, prompt 1, response 1clipped: noclipped: no",
    ]
    kept, cut = f"+0.1500, weight {math.exp(0.15):.3g}", "+0.1500, weight 0"
    assert page.tokens[0] == [[["p4"], kept, f"{token} "] for token in range(28, 32)] + [
        [["n5", "c"], cut, f"{token} "] for token in range(28, 32)
    ]
    assert ["c" in names for names, _, _ in page.tokens[1]] == [True] + [False] * 7
    assert "one rule clips tokens that the other keeps in 2 of 3 responses" in text
