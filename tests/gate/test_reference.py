"""What the gate asks about a reference model: whether it is read, whether it exists, its tokenizer and its content."""

import pytest
import torch
from safetensors.torch import load_file, save_file

import rlzoo
from rlzoo import UserError
from rlzoo.gate.enter import enter
from rlzoo.gate.settings import Start, check_settings
from rlzoo.models.pretrained import load_pretrained
from tests.training.short import make_teacher, quick

PLAIN = ["tracking.mlflow=false", "eval.num_problems=0"]


@pytest.mark.parametrize(
    ("clip", "overrides", "message"),
    [
        (
            "opd",
            [],
            r"model.reference=null: advantage 'reverse_kl' needs a teacher; set it to a model with the same tokenizer$",
        ),
        ("grpo", ["clip.advantage=reverse_kl"], r"model.reference=null: advantage 'reverse_kl' needs a teacher"),
        ("grpo", ["model.reference=embedded"], r"model.reference='embedded': nothing in this run reads its log-probs"),
        ("opd", ["model.reference=./nowhere"], r"model.reference='./nowhere': no such folder"),
    ],
)
def test_a_reference_is_there_exactly_if_it_is_read(tmp_path, clip, overrides, message):
    config = quick(tmp_path / "run", clip=clip, overrides=[*PLAIN, *overrides])
    with pytest.raises(UserError, match=f"^{message}"):
        check_settings(config, Start.of(config))


@pytest.mark.parametrize("overrides", [["learner.kl_coef=0.1"], ["clip.advantage=reverse_kl"]])
def test_a_reference_may_serve_the_loss_or_the_advantages(tmp_path, overrides):
    config = quick(tmp_path / "run", clip="grpo", overrides=[*PLAIN, "model.reference=embedded", *overrides])
    check_settings(config, Start.of(config))


def saved(folder, *, tokens=(), rows=None):
    """Save the shipped model with more tokens in its tokenizer, or more rows in its embedding and head."""
    model, tokenizer = load_pretrained("embedded")
    tokenizer.add_tokens(list(tokens))
    torch.manual_seed(0)
    model.resize_token_embeddings(rows or model.config.vocab_size, mean_resizing=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_tokenizers_are_compared_and_heads_are_not(tmp_path):
    settings = [*PLAIN, "rollout.temperature=0.8"]
    other = saved(tmp_path / "other", tokens=["<new>"], rows=200)
    config = quick(tmp_path / "run", clip="opd", overrides=[*settings, f"model.reference={other}"])
    message = (
        r"^model.reference=.*: another tokenizer \(the token '<new>' has id [0-9]+ there and None in the model's\); [^\n]*$"
    )
    with pytest.raises(UserError, match=message):
        enter(config, config.task)
    padded = saved(tmp_path / "padded", rows=200)
    config = quick(tmp_path / "run", clip="opd", overrides=[*settings, f"model.reference={padded}"], steps=1)
    kl = rlzoo.train(config).metrics[1]["reward/kl"]
    assert 0 < kl < 1  # of 200 - V tokens with random rows, which take part in the teacher's normalisation


def test_a_changed_teacher_is_named_when_a_run_resumes(tmp_path):
    teacher = make_teacher(tmp_path / "teacher")
    config = quick(tmp_path / "run", clip="opd", overrides=[*PLAIN, f"model.reference={teacher}"], steps=1)
    rlzoo.train(config)
    config = config.model_copy(update={"steps": 2})
    file = teacher / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] += 0.5
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"--resume: model reference weights has changed since the run started; undo this"):
        rlzoo.train(config, resume=True)
