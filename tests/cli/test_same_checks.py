"""Training and the dry run use the same checks: both reject the same configurations with the same line."""

import importlib.util
import json
import shutil

import pytest

from rlzoo import RunConfig, UserError, train
from rlzoo.support.extras import how_to_install
from tests.rules import few

RUN = ["train", "--clip", "grpo", "--steps", "1", "--set", "tracking.mlflow=false", "--set", "eval.num_problems=0"]

REFUSED = {
    "offload without DeepSpeed": (["launch.offload=optimizer"], "launch.offload='optimizer': offloading needs DeepSpeed"),
    "offload of everything without DeepSpeed": (["launch.offload=all"], "launch.offload='all': offloading needs DeepSpeed"),
    "offload of everything with ZeRO-2": (["launch.offload=all", "launch.deepspeed=zero2"], "launch.offload='all': parameters"),
    "offload without a stage": (
        ["launch.offload=optimizer", "launch.deepspeed=plain.json"],
        "launch.offload='optimizer': launch",
    ),
    "FSDP2 and DeepSpeed": (
        ["launch.fsdp=true", "launch.deepspeed=zero3"],
        "launch.fsdp=true and launch.deepspeed='zero3' both shard the model",
    ),
    "no such file of DeepSpeed": (["launch.deepspeed=none.json"], "launch.deepspeed='none.json': no such file"),
    "not JSON": (["launch.deepspeed=text.json"], "launch.deepspeed='text.json': not JSON"),
    "not an object": (
        ["launch.deepspeed=list.json"],
        "launch.deepspeed='list.json': the file must contain DeepSpeed's settings",
    ),
    "no section": (["launch.deepspeed=odd.json"], "launch.deepspeed='odd.json': the file must contain DeepSpeed's settings"),
    "an optimizer": (["launch.deepspeed=adam.json"], "launch.deepspeed='adam.json': the file sets 'optimizer'"),
    "no DeepSpeed": (
        ["launch.deepspeed=zero2"],
        f"launch.deepspeed='zero2': deepspeed is not installed: {how_to_install('deepspeed')}",
    ),
    "no vLLM": (["rollout.engine=vllm"], f"rollout.engine='vllm': vllm is not installed: {how_to_install('vllm')}"),
    "no PEFT": (["learner.lora.rank=4"], f"learner.lora.rank=4: peft is not installed: {how_to_install('lora')}"),
    "no gguf": (["model.path=smollm2"], "model 'smollm2': gguf is not installed"),
    "a process without a prompt": (
        ["launch.processes=5", "rollout.num_prompts=4"],
        "rollout.num_prompts=4: fewer than the 5 processes",
    ),
    "too long for the model": (["rollout.max_new_tokens=5000"], "rollout.max_new_tokens=5000: with prompts of up to 40 tokens"),
    "no such folder": (["model.path=./none"], "model.path='./none': no such folder"),
    "no such model": (
        ["model.path=smolm2"],
        "model.path='smolm2': no such model (allowed: 'embedded', 'embedded-guess',",
    ),
    "a file as model": (["model.path=text.json"], "model.path='text.json': text.json is neither a folder"),
    "a folder without a model": (["model.path=empty"], "model.path='empty': empty has no config.json"),
    "an output that is taken": (["output=taken"], "output directory 'taken' is not empty"),
    "a secret left out": (["rollout.vllm.server=http://u:<redacted>@h:1"], "rollout.vllm.server: holds a secret"),
    "a rule that does not fit": (["rollout.group_size=1"], "rollout.group_size=1: advantage 'group_norm' compares"),
}


@pytest.fixture
def here(tmp_path, monkeypatch, rlzoo):
    """The working directory of the commands, with files for their arguments; optional libraries appear to be missing."""
    here = tmp_path / "here"
    (here / "empty").mkdir()
    (here / "taken").mkdir()
    (here / "taken" / "mine").touch()
    (here / "text.json").write_text("zero")
    (here / "list.json").write_text("[]")
    (here / "odd.json").write_text('{"zero_optimization": 2}')
    (here / "plain.json").write_text("{}")
    (here / "adam.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}))
    real = importlib.util.find_spec
    gone = ("deepspeed", "vllm", "peft", "gguf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in gone else real(name, *rest))
    return here


@pytest.mark.parametrize(("overrides", "line"), few(REFUSED.values(), 8), ids=list(REFUSED))
def test_training_and_dry_run_refuse_with_the_same_line(refused, here, overrides, line):
    words = [word for pair in overrides for word in ("--set", pair)]
    planned, trained = refused(*RUN, *words, "--dry-run"), refused(*RUN, *words)
    assert trained == planned
    assert trained.startswith(line.format(here=here))


@pytest.mark.parametrize("name", ["offload without DeepSpeed", "no PEFT", "an output that is taken"])
def test_training_from_python_refuses_with_the_same_line(here, monkeypatch, name):
    monkeypatch.chdir(here)
    overrides, line = REFUSED[name]
    config = RunConfig.compose(clip="grpo", overrides=["tracking.mlflow=false", *overrides], steps=1)
    with pytest.raises(UserError) as refusal:
        train(config)
    assert str(refusal.value).startswith(line.format(here=here))


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("ACCELERATE_USE_FSDP", "the launcher's configuration asks for FSDP; remove it there, and pass --fsdp"),
        ("ACCELERATE_USE_DEEPSPEED", "the launcher's configuration asks for DeepSpeed"),
    ],
)
def test_unsupported_launcher_variables_are_refused_by_train_and_dry_run(refused, monkeypatch, asked, line):
    monkeypatch.setenv(asked, "true")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert refused(*RUN, "--dry-run") == refused(*RUN)
    assert refused(*RUN).startswith(line)


def test_a_run_to_resume_can_be_planned(rlzoo, here, trained):
    shutil.copytree(trained.path, here / "run")
    code, out, err = rlzoo("train", "--resume", "--output", "run", "--dry-run")
    assert code == 0, err
    assert "output: run" in out
