"""The gate: one call before the first step, which every way into a run passes."""

import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlzoo import RunConfig, UserError, train
from rlzoo.gate.enter import TO_TRAIN, Admission, enter
from rlzoo.lab.sweep import Sweep
from tests.models.tiny import save
from tests.quick import QUICK


@pytest.fixture
def short_model(tmp_path):
    """A model with 16 positions, too few for a prompt and a response."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    save(tmp_path / "short", LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes)))
    return str(tmp_path / "short")


def test_every_entry_point_refuses_with_the_same_check(tmp_path, rlzoo, short_model):
    settings = [f"model.path={short_model}", "rollout.max_new_tokens=40", *QUICK]
    config = RunConfig.compose(clip="grpo", overrides=settings, steps=1, output=tmp_path / "run")
    with pytest.raises(UserError, match=r"rollout.max_new_tokens=40: .* accepts at most 16") as refused:
        train(config)
    words = [word for setting in settings for word in ("--set", setting)]
    for more in ([], ["--dry-run"]):
        code, _, err = rlzoo("train", "--clip", "grpo", "--steps", "1", "--output", str(tmp_path / "run"), *words, *more)
        assert (code, err.strip().splitlines()[-1]) == (2, f"rlzoo: {refused.value}")
    suite = [
        "eval",
        short_model,
        "--suite",
        "arithmetic",
        "--set",
        "rollout.max_new_tokens=40",
        "--output",
        str(tmp_path / "e"),
    ]
    code, _, err = rlzoo(*suite)
    assert code == 2
    assert "accepts at most 16" in err
    assert not (tmp_path / "run").exists()


def test_a_sweep_checks_all_runs_before_it_starts_the_first(tmp_path):
    too_few = ["rollout.num_prompts=1", "launch.processes=2"]
    with pytest.raises(UserError, match="fewer than the 2 processes"):
        Sweep(tmp_path / "race", ("grpo", "fspo"), (0,), overrides=tuple(too_few))
    assert not (tmp_path / "race").exists()


def test_a_failed_admission_check_closes_the_sampler(tmp_path, monkeypatch):
    closed = []

    def refuse(admission):
        admission.sampler.close = lambda: closed.append(True)
        raise UserError("no")

    questions = tuple(refuse if question.__name__ == "room" else question for question in TO_TRAIN)
    monkeypatch.setattr("rlzoo.gate.enter.TO_TRAIN", questions)
    config = RunConfig.compose(clip="grpo", overrides=QUICK, steps=1, output=tmp_path / "run")
    with pytest.raises(UserError, match="no"):
        enter(config, config.task)
    assert closed == [True]


def test_a_run_that_may_not_fit_warns_in_train_and_is_refused_in_a_dry_run(tmp_path, monkeypatch, caplog, rlzoo):
    monkeypatch.setattr("rlzoo.gate.devices.total_memory", lambda: 10_000_000)
    config = RunConfig.compose(clip="grpo", overrides=QUICK, steps=1, output=tmp_path / "run")
    assert isinstance(enter(config, config.task), Admission)
    assert "a process needs" in caplog.text
    words = [word for setting in QUICK for word in ("--set", setting)]
    code, _, err = rlzoo("train", "--clip", "grpo", *words, "--dry-run")
    assert code == 2
    assert "a process needs" in err


def test_a_configuration_is_passed_to_few_modules_and_plugins_are_loaded_once(tmp_path):
    """From composing a run to its first step, counting the functions that get the `RunConfig` as an argument."""
    visits, loaded = [], 0

    def watch(frame, event, _):
        nonlocal loaded
        code = frame.f_code
        if event != "call" or "rlzoo" not in code.co_filename:
            return
        loaded += code.co_name == "load_zoo"
        module = frame.f_globals.get("__name__", "")
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        is_passed = any(isinstance(frame.f_locals.get(name), RunConfig) for name in names if name != "self")
        if is_passed and visits[-1:] != [module] and module.startswith("rlzoo."):
            visits.append(module)

    def first_step(step, metrics):
        raise KeyboardInterrupt  # step 0 is the evaluation before the first step

    sys.setprofile(watch)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(RunConfig.compose(clip="fspo", overrides=QUICK, steps=1, output=tmp_path / "run"), first_step)
    finally:
        sys.setprofile(None)
    assert loaded == 1
    assert len(set(visits)) <= 10
    assert len(visits) - len(set(visits)) <= 4
