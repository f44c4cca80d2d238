"""Writes a rollout file using only numpy and safetensors, as any trainer can do.

python examples/write_rollouts.py 000001.safetensors
rlzoo replay 000001.safetensors --clip fspo,gspo,grpo
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from safetensors.numpy import save_file


@dataclass
class Response:
    """A response with its prompt."""

    prompt: list[int]
    completion: list[int]
    group: int  # number of the prompt
    advantage: float
    old_log_probs: np.ndarray  # log-probs of the completion's tokens before the first optimizer step of the batch


def write(file: str, step: int, responses: list[Response], minibatches: list[tuple[list[int], list[np.ndarray]]]) -> None:
    """Write one rollout batch. A minibatch holds its responses' indices and their log-probs before its optimizer step."""
    masks = [[False] * len(each.prompt) + [True] * len(each.completion) for each in responses]
    tensors = {
        "token_ids": joined(each.prompt + each.completion for each in responses),
        "sequence_lengths": np.array(list(map(len, masks))),
        "response_mask": joined(masks),
        "group_ids": np.array([each.group for each in responses]),
        "advantages": np.array([each.advantage for each in responses], dtype=np.float32),
        "old_log_probs": joined(each.old_log_probs for each in responses).astype(np.float32),
    }
    for index, (rows, log_probs) in enumerate(minibatches):
        tensors |= {f"rows/{index}": np.array(rows), f"log_probs/{index}": joined(log_probs).astype(np.float32)}
    save_file(tensors, file, {"rlzoo_rollouts": json.dumps({"version": 2, "step": step})})


def joined(rows: Iterable[object]) -> np.ndarray:
    """Concatenate ragged rows."""
    return np.concatenate([np.asarray(row) for row in rows])


if __name__ == "__main__":  # 256 responses to 32 prompts; every log-prob changes a little before the second of two minibatches
    rng = np.random.default_rng(0)
    made = [
        Response([1, 2, 3], rng.integers(4, 99, length).tolist(), index // 8, rng.normal(), -0.5 - rng.random(length))
        for index, length in enumerate(rng.integers(2, 400, 256))
    ]
    moved = [each.old_log_probs + rng.normal(0, 0.03, len(each.completion)) for each in made]
    unmoved = [each.old_log_probs for each in made]
    write(sys.argv[1], 1, made, [(list(range(128)), unmoved[:128]), (list(range(128, 256)), moved[128:])])
