"""Writes a rollout file with numpy and safetensors alone, as any trainer can: python examples/write_rollouts.py 000001.safetensors

Afterwards: rlzoo replay 000001.safetensors --clip fspo,gspo,grpo
"""

import sys

import numpy as np
from safetensors.numpy import save_file


def write(file, step, responses, minibatches):
    """Write one rollout batch.

    Each response has its prompt's tokens, its own tokens, the prompt it answers, its advantage and the old log-probs of its own
    tokens. Each minibatch lists responses and the log-probs of their tokens just before its optimizer step.
    """
    prompts, completions = [each["prompt"] for each in responses], [each["completion"] for each in responses]
    pairs = list(zip(prompts, completions, strict=True))
    tensors = {
        "token_ids": np.concatenate([prompt + completion for prompt, completion in pairs]),
        "sequence_lengths": np.array([len(prompt) + len(completion) for prompt, completion in pairs]),
        "response_mask": np.concatenate([[False] * len(prompt) + [True] * len(completion) for prompt, completion in pairs]),
        "group_ids": np.array([each["group"] for each in responses]),
        "advantages": np.array([each["advantage"] for each in responses], dtype=np.float32),
        "old_log_probs": np.concatenate([each["old_log_probs"] for each in responses]).astype(np.float32),
    }
    for index, (rows, log_probs) in enumerate(minibatches):
        tensors[f"rows/{index}"] = np.array(rows)
        tensors[f"log_probs/{index}"] = np.concatenate(log_probs).astype(np.float32)
    save_file(tensors, file, {"format": "rlzoo-rollouts", "version": "1", "step": str(step)})


if __name__ == "__main__":  # 16 responses to 4 prompts, whose tokens moved a little before the second of two minibatches
    rng = np.random.default_rng(0)
    made = [
        {
            "prompt": [1, 2, 3],
            "completion": rng.integers(4, 99, length).tolist(),
            "group": index // 4,
            "advantage": rng.normal(),
            "old_log_probs": -rng.random(length),
        }
        for index, length in enumerate(rng.integers(2, 60, 16))
    ]
    moved = [each["old_log_probs"] + rng.normal(0, 0.03, len(each["completion"])) for each in made]
    unmoved = [each["old_log_probs"] for each in made]
    write(sys.argv[1], 1, made, [(range(8), unmoved[:8]), (range(8, 16), moved[8:])])
