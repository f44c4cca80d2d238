"""`rlzoo train --dry-run` prints the plan, and one line for each thing that would stop the run later.

`rlzoo sweep --dry-run` prints the runs.
"""

import json
import re
import shutil
import sys
import time
from types import SimpleNamespace

import pytest
import yaml

from rlzoo import RunConfig
from rlzoo.gate.tokens import Asked
from rlzoo.support.extras import how_to_install

SMALL = ["--set", "rollout.num_prompts=12", "--set", "rollout.group_size=4"]


def settings(*pairs):
    return [word for pair in pairs for word in ("--set", pair)]


@pytest.fixture
def model(tmp_path):
    """A folder with the configuration of a model with 8 billion parameters and 4,096 positions, but no weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    shape = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    shape |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(shape))
    return folder


def test_the_configuration_is_on_stdout_and_the_plan_on_stderr(rlzoo):
    code, out, err = rlzoo("train", "--clip", "gspo", "--dry-run")
    assert code == 0
    assert yaml.safe_load(out)["clip"]["name"] == "gspo"
    # 40 steps of 32 x 8 responses of at most 80 tokens, 4 optimizer steps each; 99,7xx parameters
    assert "40 of 256 responses; 160 optimizer steps in all" in err
    assert "at most 819,200 sampled" in err
    lines = [line for line in err.splitlines() if line.startswith(("devices ", "memory "))]
    assert [re.sub(r"\d[\d,.]*", "N", line.split(maxsplit=1)[1]) for line in lines] == [
        "this machine's CPU, N GB of memory, one process",
        "N MB of N GB, estimated:",
    ]
    for word in ("weights", "optimizer states", "activations of a micro-batch", "sampler", "disk"):
        assert word in err


def test_the_plan_counts_questions_and_warns_if_too_few_are_held_out(rlzoo):
    few = settings("task.operand_max=3", "task.num_operands_max=2", "eval.num_problems=9")  # 9 sums, one of them held out
    code, _, err = rlzoo("train", "--clip", "gspo", "--dry-run", *few)
    assert code == 0
    assert re.findall("^note +(.*)$", err, re.MULTILINE)[:2] == [
        "task arithmetic: endless training questions, 1 held out",
        "eval.num_problems=9: only 1 questions are held out and evaluated; add questions, or lower it",
    ]


def test_json_output_holds_configuration_and_plan_in_one_document(rlzoo):
    code, out, err = rlzoo("train", "--clip", "rloo", "--dry-run", "--json", *SMALL)
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["config"]["clip"]["name"] == "rloo"
    plan = document["plan"]
    assert (plan["steps"], plan["responses"], plan["optimizer_steps"]) == (40, 1920, 160)
    assert plan["prompt_tokens"]["counted"]
    assert plan["memory_bytes"]["learner"]["weights"] == plan["parameters"] * 4


def test_a_plan_for_other_devices_has_a_process_for_each(rlzoo, model):
    more = settings(f"model.path={model}", "model.dtype=bfloat16", "launch.deepspeed=zero3", "rollout.engine=vllm")
    code, out, _ = rlzoo("train", "--dry-run", "--json", "--devices", "8xH100", *more)
    plan = json.loads(out)["plan"]
    assert code == 0
    assert (plan["processes"], plan["zero_stage"]) == (8, 3)
    assert any("vllm is not installed" in note for note in plan["notes"])  # reported, because the other machine needs it


@pytest.mark.long
def test_a_dry_run_is_quick(rlzoo):
    rlzoo("train", "--dry-run")
    started = time.process_time()
    rlzoo("train", "--dry-run")
    assert time.process_time() - started < 2


def test_devices_requires_dry_run(refused):
    assert refused("train", "--devices", "8xH100") == "--devices needs --dry-run"
    assert refused("train", "--dry-run", "--devices", "many").startswith(
        "--devices 'many': expected a value such as 8xH100 or 2x24GB; names: "
    )


def test_more_processes_than_devices_are_refused(refused):
    assert refused("train", "--dry-run", "--devices", "2xH100", *settings("launch.processes=4")) == (
        "launch.processes=4: more than the 2 devices of --devices; each process needs a device"
    )


def test_processes_of_a_launcher_are_counted(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "5")
    assert "fewer than the 5 processes" in refused("train", "--dry-run", *settings("rollout.num_prompts=4"))


def test_responses_beyond_the_models_positions_are_refused(refused, model):
    # prompts of the task have up to 57 letters, about 29 tokens without a tokenizer; 4,096 - 29 remain
    line = refused("train", "--dry-run", *settings(f"model.path={model}", "rollout.max_new_tokens=4090"))
    assert line.startswith("rollout.max_new_tokens=4090: with prompts of up to about ")
    assert f"but model {str(model)!r} accepts at most 4096; set rollout.max_new_tokens to at most 40" in line
    embedded = refused("train", "--dry-run", *settings("rollout.max_new_tokens=5000"))
    assert "with prompts of up to 40 tokens, a sequence length of 5040 is needed, but model 'embedded' accepts" in embedded


def test_responses_beyond_vllms_limit_are_refused(refused):
    more = settings("rollout.engine=vllm", "rollout.vllm.max_model_len=100")
    line = refused("train", "--dry-run", "--devices", "1xH100", *more)
    assert line == (
        "rollout.vllm.max_model_len=100: with prompts of up to 40 tokens, a sequence length of 120 is needed; "
        "raise it, or remove it to use the model's own limit"
    )


@pytest.mark.parametrize(("library", "extra"), [("math_verify", "math-verify"), ("datasets", "datasets")])
def test_a_library_that_the_data_needs_is_named(refused, monkeypatch, library, extra):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == library else object())
    line = refused("train", "--dry-run", "--config", "paper/qwen3-1.7b")
    assert line == f"{library} is not installed: {how_to_install(extra)}"


@pytest.mark.parametrize(("library", "name"), [("textarena", "TextArena"), ("openenv", "OpenEnv"), ("verifiers", "Verifiers")])
def test_a_library_that_an_environment_needs_is_named(refused, monkeypatch, library, name):
    monkeypatch.setitem(sys.modules, library, None)  # Python itself records None for a module that cannot be imported
    more = ("task.name=environment", f"task.environment=rlzoo_{library}:{name}", "task.workers=0")
    line = refused("train", "--dry-run", *settings(*more))
    reason = f"{library} is not installed: {how_to_install(library)}"
    assert line == f"task 'environment': cannot begin an episode: {reason}"


def failing_plan(rlzoo, *arguments):
    """Return the line of a plan that is shown but fails; the configuration is not printed."""
    code, out, err = rlzoo("train", "--dry-run", *arguments)
    assert (code, out) == (2, "")
    plan, _, line = err.strip().rpartition("\n")
    assert "micro-batch" in plan
    assert line.startswith("rlzoo: ")
    return line.removeprefix("rlzoo: ")


def test_a_disk_that_will_be_full_is_refused(rlzoo, monkeypatch):
    free = shutil.disk_usage("/")._replace(free=20_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    line = failing_plan(rlzoo, "--output", "deep/out")
    assert line.startswith("output directory 'deep/out': 30.1 MB is needed (checkpoints ")
    assert line.endswith("but only 20.0 MB is free; choose another with --output, or lower checkpoint.keep")


def test_a_model_that_cannot_fit_is_refused(rlzoo, model):
    line = failing_plan(rlzoo, "--devices", "1xRTX4090", *settings(f"model.path={model}", "model.dtype=bfloat16"))
    # 8.03 billion parameters: 16.1 GB of weights, 64.2 GB of moments, 32.1 GB each of master weights and gradients
    assert line.startswith(f"model.path={str(model)!r}: a process needs ")
    assert "but RTX4090 has 24.0 GB for it (the largest parts: " in line
    assert "optimizer states 64.2 GB" in line
    bfloat16 = settings(f"model.path={model}", "model.dtype=bfloat16")
    sharded = [*bfloat16, *settings("launch.deepspeed=zero3")]
    for devices, given, expected in (
        ("8xH100", bfloat16, {"launch.deepspeed=zero3", "launch.fsdp=true"}),
        ("2xRTX4090", [*sharded, *settings("launch.processes=2")], set()),
    ):
        line = failing_plan(rlzoo, "--devices", devices, *given)
        ways = [option.rpartition(" (") for option in line.partition("); set ")[2].split(" or ")]
        assert expected <= {way for way, _, _ in ways}
        for way, _, peak in ways:
            changes, _, more = way.partition(" with --devices ")
            changed = [*given, *settings(*changes.split(" and "))]
            out = rlzoo("train", "--dry-run", "--json", "--devices", more or devices, *changed)[1]
            needed = json.loads(out)["plan"]["memory_bytes"]
            most = max(needed[part]["total"] for part in ("learner", "sampling"))
            assert most / 1e9 == pytest.approx(float(peak.removesuffix(" GB)")), abs=0.06)


@pytest.mark.long
def test_processes_on_a_cpu_share_its_memory(rlzoo, monkeypatch):
    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=60_000_000, available=60_000_000))
    small = settings("learner.max_tokens_per_micro_batch=1920")  # 16 rows of 120 tokens: 35 MB
    assert rlzoo("train", "--dry-run", *small)[0] == 0
    line = failing_plan(rlzoo, *small, *settings("launch.processes=2"))
    assert "this machine's CPU has 30.0 MB for it" in line


def test_vllm_without_room_for_weights_and_a_response_is_refused(rlzoo, model):
    more = settings(f"model.path={model}", "rollout.engine=vllm", "model.dtype=bfloat16", "learner.lora.rank=8")
    line = failing_plan(rlzoo, "--devices", "1xH100", *more, *settings("rollout.vllm.gpu_memory_utilization=0.2"))
    assert line.startswith("rollout.vllm.gpu_memory_utilization=0.2: 16.0 GB cannot hold vLLM's weights (16.1 GB)")


def test_an_unknown_model_shape_is_reported_and_the_rest_is_planned(rlzoo):
    code, out, err = rlzoo("train", "--dry-run", *settings("model.path=nobody/nothing"))
    assert code == 0
    assert yaml.safe_load(out)["model"]["path"] == "nobody/nothing"
    assert "the shape of model 'nobody/nothing' is not known on this machine: memory and disk are not estimated" in err
    assert "160 optimizer steps in all" in err


def test_the_plan_of_a_game_counts_environment_tokens(rlzoo):
    code, out, err = rlzoo("train", "--config", "guess", "--dry-run", "--json", "--devices", "1x24GB")
    assert code == 0, err
    plan = json.loads(out)["plan"]
    # 40 steps of 128 games of at most 208 tokens; a prompt of 12, and 8 tokens of the environment between 16 turns
    assert plan["response_tokens_at_most"] == 40 * 128 * 208
    assert plan["micro_batch"]["tokens"] == plan["micro_batch"]["rows"] * (12 + 208 + 15 * 8)


def test_the_plan_counts_tool_descriptions_in_the_prompt():
    settings_of_a_task = [
        "task.name=tools",
        "task.problems.name=arithmetic",
        "task.tools=[rlzoo.tasks.environments.tools:calculator]",
    ]
    config = RunConfig.compose(overrides=[*settings_of_a_task, "model.path=an/unknown-model", "model.chat_template=true"])
    with config.task as task:
        asked = Asked.of(task, needed=4, held_out=0)
        models = config.model.model_copy(update={"chat_template": False}), config.model
        plain, described = (asked.estimate(model, config.rollout, None).longest for model in models)
    assert described - plain - 64 > 100  # two bytes to a token: the schema has more than 200


def test_a_sweep_names_the_differences_between_its_rules_before_it_starts(rlzoo):
    code, out, _ = rlzoo("sweep", "--clip", "grpo,real", "--seeds", "2", "--grid", "learner.lr=1e-4,2e-4", "--dry-run")
    assert code == 0
    names = [f"{clip}-lr={lr}-{seed}" for seed in (0, 1) for clip in ("grpo", "real") for lr in ("1e-4", "2e-4")]
    assert out.splitlines() == [
        *names,
        "the rule is not the only difference: learner.minibatch_by differs between the runs (responses, prompts)",
        "the rules differ in clip.advantage (group_norm, group_mean)",
    ]
