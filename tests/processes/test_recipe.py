"""The paper's recipe end to end on a small scale: ZeRO-3 in two processes, real questions, resume, and evaluation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.processes.test_processes import environment

DATA = os.environ.get("RLZOO_DATA")
pytestmark = [
    pytest.mark.deepspeed,
    pytest.mark.skipif(
        DATA is None, reason="RLZOO_DATA names no folder with gsm8k_train.jsonl, gsm8k_test.jsonl and math500.jsonl"
    ),
]

ENGINE = os.environ.get("RLZOO_TEST_ENGINE", "hf")
REWARD = '''
async def odd_length(problem, response):
    """Random weights solve nothing, and where all fail there is nothing to learn."""
    return float(len(response) % 2)
'''


def questions(name):
    return [json.loads(line) for line in (Path(DATA) / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A Qwen3 with random weights, and a tokenizer of the questions' bytes."""
    folder = tmp_path_factory.mktemp("tiny-qwen3")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator((row["question"] for row in questions("gsm8k_train.jsonl")), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>")
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def rlzoo(folder, *arguments):
    told = {name: value for name, value in environment("zero3").items() if name != "ACCELERATE_USE_CPU"}
    command = [sys.executable, "-m", "rlzoo", *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, timeout=600, check=False)


def test_the_recipe_runs_from_end_to_end(tiny, tmp_path):
    (tmp_path / "small_reward.py").write_text(REWARD)
    changed = {
        "model.path": tiny, "task.path": f"{DATA}/gsm8k_train.jsonl", "task.eval_path": f"{DATA}/math500.jsonl",
        "task.reward": "small_reward:odd_length", "rollout.engine": ENGINE,
        "rollout.num_prompts": 6, "rollout.group_size": 4, "rollout.max_new_tokens": 24, "eval.num_problems": 4,
        "learner.lr": 1e-3, "learner.warmup_updates": 0, "checkpoint.every": 1, "tracking.mlflow": "false",
    }  # fmt: skip
    settings = [part for key, value in changed.items() for part in ("--set", f"{key}={value}")]
    recipe = ["train", "--config", "paper/qwen3-1.7b", "--clip", "gspo", "--processes", "2", "--deepspeed", "zero3"]
    done = rlzoo(tmp_path, *recipe, "--steps", "2", "--output", "run", *settings)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[1]["learner/grad_norm"] > 0
    assert rows[1]["learner/skipped"] == 0
    done = rlzoo(tmp_path, "train", "--resume", "--output", "run", "--steps", "3")
    assert done.returncode == 0, done.stderr
    resumed = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert resumed[:3] == rows
    assert resumed[3]["step"] == 3
    assert resumed[3]["learner/grad_norm"] > 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.hidden_size == 64
    evaluated = ["--suite", "gsm8k", "--data", DATA, "--limit", "3", "--k", "2", "--max-new-tokens", "16", "--no-mlflow",
                 "--set", f"rollout.engine={ENGINE}"]  # fmt: skip
    done = rlzoo(tmp_path, "eval", "run", *evaluated, "--output", "eval", "--json")
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "eval" / "completions" / "gsm8k.jsonl").read_text().splitlines()) == 3
