"""How a run is composed: which source takes precedence, and that config.yaml reproduces the run."""

import json
import re
from typing import get_args

import pytest
import torch
import yaml
from pydantic import BaseModel, Field

from rlzoo import ClipPolicy, RunConfig, UserError, load_zoo
from rlzoo.config.composition import config_names, read_config
from rlzoo.core.reductions import Reduction, StepCounts, reduce_objective
from rlzoo.core.zoo import log_once
from rlzoo.testing.data import on_policy_inputs
from tests.rules import by_inputs


def write(path, text):
    path.write_text(text)
    return path


def test_later_sources_override_earlier_ones(tmp_path):
    first = write(tmp_path / "first.yaml", "learner: {lr: 0.1, weight_decay: 0.1}\nsteps: 7\n")
    second = write(tmp_path / "second.yaml", "learner: {lr: 0.2}\n")
    config = RunConfig.compose([first, second], overrides=["learner.lr=0.3"], clip="grpo")
    assert (config.learner.lr, config.learner.weight_decay, config.steps) == (0.3, 0.1, 7)
    assert RunConfig.compose([first, second]).learner.lr == 0.2
    assert RunConfig.compose([first], steps=9).steps == 9


def test_the_default_run_is_the_base_of_configs_without_a_model(tmp_path):
    assert RunConfig.compose().model.path == "embedded"
    overlay = RunConfig.compose(["dapo"])
    assert (overlay.clip.name, overlay.clip.clip_high, overlay.eval.num_problems) == ("grpo", 0.28, 1000)
    whole = write(tmp_path / "whole.yaml", "model: {path: elsewhere}\nclip: grpo\n")
    assert RunConfig.compose([whole]).eval.num_problems == 0


def test_settings_for_one_policy_are_applied_when_it_is_chosen(tmp_path):
    file = write(
        tmp_path / "mine.yaml",
        "model: {path: embedded}\nclip: {name: fspo}\nlearner: {lr: 0.1}\n"
        "per_clip:\n  gspo: {clip: {clip_low: 0.005}, learner: {lr: 0.2}}\n  fspo: {clip: {drift: -0.001}}\n",
    )
    gspo = RunConfig.compose([file], clip="gspo")
    assert (gspo.clip.clip_low, gspo.clip.clip_high, gspo.learner.lr) == (0.005, 4e-4, 0.2)
    fspo = RunConfig.compose([file])
    assert (fspo.clip.drift, fspo.learner.lr) == (-0.001, 0.1)
    assert RunConfig.compose([file], clip="gspo", overrides=["clip.clip_low=0.01"]).clip.clip_low == 0.01


def test_choosing_a_policy_drops_the_settings_of_another():
    config = RunConfig.compose(["dapo"], clip="fspo")
    assert config.clip.name == "fspo"
    assert config.clip.reduction == "sequence_mean"


def test_config_yaml_round_trips(tmp_path):
    for name in ("fspo", "gspo", "grpo", "rloo"):
        config = RunConfig.compose(clip=name, seed=3, overrides=["learner.lr=1e-5", "task.num_operands_max=5"])
        file = write(tmp_path / f"{name}.yaml", config.to_yaml())
        assert RunConfig.compose([file]) == config


@pytest.mark.parametrize("text", ["[q_proj, mlp.up_proj]", "v_proj", r".*\.(k|v)_proj", "all-linear"])
def test_adapter_targets_round_trip_through_config_yaml(tmp_path, text):
    config = RunConfig.compose(clip="fspo", overrides=["learner.lora.rank=2", f"learner.lora.target={text}"])
    assert config.learner.lora.target == tuple(text.strip("[]").split(", "))
    file = write(tmp_path / "config.yaml", config.to_yaml())
    assert RunConfig.compose([file]) == config


def leaves(settings, path=()):
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


# a paper's recipe states every value with its source
@pytest.mark.parametrize("name", [name for name in config_names() if not name.startswith("paper/")])
def test_a_shipped_config_contains_only_non_default_values(name):
    settings = read_config(name)
    usual = RunConfig(clip=settings["clip"]["name"]).model_dump(mode="json")
    repeated = []
    for path, value in leaves({key: section for key, section in settings.items() if key != "per_clip"}):
        default = usual
        for key in path:
            default = default.get(key) if isinstance(default, dict) else None
        if default == value and path not in {("model", "path"), ("task", "name"), ("clip", "name"), ("steps",)}:
            repeated.append(".".join(path))
    assert repeated == []


@pytest.mark.parametrize("name", [name for name in config_names() if not name.startswith(("smollm2", "paper/"))])
def test_every_shipped_config_is_valid(name):
    RunConfig.compose([name])


@pytest.mark.parametrize("name", by_inputs())
def test_a_reduction_that_does_not_suit_a_rule_is_refused_before_the_run(name):
    inputs = on_policy_inputs(load_zoo()[name]())
    groups = torch.arange(len(inputs.response_mask))[:, None] // 2
    counts, longest = StepCounts.of(inputs.response_mask, groups), inputs.response_mask.shape[1]
    for reduction in get_args(Reduction):
        try:
            rule = RunConfig.compose(clip=name, overrides=[f"clip.reduction={reduction}"]).clip
        except UserError:
            continue
        assert reduce_objective(rule(inputs).objective, inputs.response_mask, reduction, counts, longest).isfinite()


def test_python_and_yaml_configs_are_equivalent():
    config = RunConfig(clip="fspo", task={"name": "arithmetic", "num_operands_max": 5}, steps=3)
    assert config.clip == load_zoo()["fspo"]()
    assert yaml.safe_load(config.to_yaml())["task"]["num_operands_max"] == 5


def test_errors_in_python_configs_are_value_errors():
    with pytest.raises(ValueError, match="unknown rule 'fsop'"):
        RunConfig(clip="fsop")
    with pytest.raises(UserError, match=r"per_clip must map the names of rules"):
        RunConfig.compose(per_clip=[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("clip: 5\nper_clip: {}\n", "clip=5: expected the name of a rule, or settings that include a name"),
        ("clip: {name: [1]}\n", "clip="),
        ("clip: fspo\nper_clip: {fspo: [1]}\n", "per_clip must map the names of rules"),
        ("? \n", "odd.yaml': None is not a valid key"),
        ("clip: fspo\ntask: {1: 2}\n", "task: 1 is not the name of a setting"),
        ('clip: fspo\nplugins: ["a\\0b"]\n', "cannot be accessed"),
        ("clip: fspo\nsteps: 2001-99-99\n", "steps='2001-99-99': input should be a valid integer"),
        ("clip: fspo\nsteps: &a [*a]\n", "is not valid YAML: lists or mappings nested deeper than"),
    ],
)
def test_odd_config_files_are_refused_in_one_line(tmp_path, text, message):
    file = write(tmp_path / "odd.yaml", text)
    with pytest.raises(UserError) as refusal:
        RunConfig.compose([file], clip="fspo" if text.startswith("clip: 5") else None)
    assert message in str(refusal.value)


def test_names_that_no_file_can_have_are_refused():
    for name in ("\0", "a" * 5000, "\ud800"):
        with pytest.raises(UserError, match="no config"):
            RunConfig.compose([name])
        with pytest.raises(UserError, match="cannot be accessed"):
            RunConfig.compose(clip="fspo", plugins=[name])


@pytest.mark.parametrize("template", ["{question}", "{question}="])
def test_a_template_needs_no_quotes(template):
    assert RunConfig.compose(clip="fspo", overrides=[f"task.template={template}"]).task.template == template


def test_a_run_says_whether_the_settings_of_the_default_run_apply(tmp_path, caplog):
    log_once.cache_clear()
    own = [write(tmp_path / "own.yaml", "model: {path: embedded}\n")]
    with caplog.at_level("INFO", "rlzoo"):
        RunConfig.compose(clip="fspo")
        RunConfig.compose(own, clip="fspo", overrides=["learner.lr=1e-4"])
        RunConfig.compose(clip="fspo", overrides=["model.path=mine", "learner.lr=1e-4"])
        assert not caplog.messages
        RunConfig.compose(clip="fspo", overrides=["model.path=mine"])
        RunConfig.compose(own, clip="fspo")
    theirs, ours = caplog.records
    assert theirs.levelname == "WARNING"
    assert (
        "model.path='mine': learner.lr=0.0003, the widths of rules and other settings are those of ari" in theirs.getMessage()
    )
    assert ours.levelname == "INFO"
    assert "model.path='embedded': learner.lr=1e-06, the widths of rules and other settings are not those" in ours.getMessage()


def test_settings_for_a_rule_that_is_not_loaded_are_reported(tmp_path, caplog):
    log_once.cache_clear()
    own = write(tmp_path / "own.yaml", "model: {path: embedded}\nper_clip: {fsp: {clip: {width_low: 0.5}}, gspo: {steps: 3}}\n")
    RunConfig.compose(own, clip="fspo")
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ["per_clip.fsp: no such rule is loaded; did you mean 'fspo'?"]


@pytest.mark.long
def test_odd_overrides_are_refused():
    for override in ("a." * 5000 + "a=1", "\ud800=1", "steps=" + "[" * 5000, "steps=0x" + "f" * 5000):
        with pytest.raises(UserError, match="--set"):
            RunConfig.compose(clip="fspo", overrides=[override])


BOOLEANS = [
    "learner.lr=true", "rollout.top_p=True", "rollout.group_size=TRUE", "rollout.top_k=true", "seed=false", "steps=true",
    "learner.betas=[0.9, false]", "learner.lora={rank: true}", "eval.num_samples=true", "task.timeout=true",
    "clip.width_low=true", "correction={name: tis, high: true}", "clip.advantage={name: gigpo, weight: true}",
]  # fmt: skip


@pytest.mark.parametrize("override", BOOLEANS)
def test_a_boolean_is_not_a_number_in_any_settings(override):
    with pytest.raises(UserError, match="expected a number, not a boolean"):
        RunConfig.compose(clip="fspo", overrides=[override])


def test_a_boolean_is_not_a_number_in_settings_of_others():
    class Nested(BaseModel):
        width: float = 1.0

    class Own(ClipPolicy):
        name, paper, scope = "own", "none", "token"
        widths: dict[str, float] = Field(default_factory=dict)
        pair: tuple[int, bool] | None = None
        nested: Nested = Nested()
        either: int | bool = 0

        def __call__(self, inputs):
            raise NotImplementedError

    for settings in ({"widths": {"a": 1, "b": True}}, {"pair": [True, True]}, {"nested": {"width": True}}):
        with pytest.raises(ValueError, match="expected a number, not a boolean"):
            Own(**settings)
    own = Own(pair=(1, True), either=True)
    assert (own.pair, own.either) == ((1, True), True)


def test_a_switch_takes_the_usual_words_and_nothing_else():
    words = {"true": True, "on": True, "yes": True, "1": True, "False": False, "off": False, "no": False, "0": False}
    for word, value in words.items():
        assert RunConfig.compose(clip="fspo", overrides=[f"learner.packing={word}"]).learner.packing is value
    for word in ("2", "maybe", "null", "[]"):
        with pytest.raises(UserError, match=r"learner\.packing="):
            RunConfig.compose(clip="fspo", overrides=[f"learner.packing={word}"])


def test_quoted_numbers_and_underscores_are_numbers_in_number_settings(tmp_path):
    file = write(tmp_path / "mine.yaml", 'steps: "3"\nrollout: {max_new_tokens: 1_000}\nlearner: {lr: 5e-6}\n')
    config = RunConfig.compose([file])
    assert (config.steps, config.rollout.max_new_tokens, config.learner.lr) == (3, 1000, 5e-6)


def test_free_settings_have_the_types_of_yaml_1_2(tmp_path):
    arguments = "{turns: 3, least: 1e-3, most: [1:30, on, 2E2]}"
    text = f"task: {{name: environment, environment: 'tests.tasks.environments.games:Words', arguments: {arguments}}}\n"
    config = RunConfig.compose([write(tmp_path / "free.yaml", text)], clip="grpo")
    assert config.task.arguments == {"turns": 3, "least": 0.001, "most": ["1:30", "on", 200.0]}
    assert RunConfig.compose([write(tmp_path / "again.yaml", config.to_yaml())]) == config
    assert yaml.safe_load(config.to_yaml())["task"]["arguments"] == config.task.arguments


def test_a_section_that_occurs_twice_is_refused(tmp_path):
    file = write(tmp_path / "twice.yaml", "rollout: {group_size: 4}\nsteps: 3\nrollout: {top_p: 0.9}\n")
    with pytest.raises(UserError, match="line 3 repeats the key 'rollout' of line 1"):
        RunConfig.compose([file])
    with pytest.raises(UserError, match="line 1 repeats the key 'rank' of line 1"):
        RunConfig.compose(overrides=["learner.lora={rank: 8, rank: 16}"])


def test_home_is_expanded_in_every_path_of_a_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    rows = "".join(json.dumps({"question": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in range(40))
    write(tmp_path / "rows.jsonl", rows)
    write(tmp_path / "zero.json", "{}")
    write(
        tmp_path / "home.yaml",
        "output: ~/run\nmodel: {path: ~/model}\ntask: {name: math_file, path: ~/rows.jsonl, eval_path: ~/rows.jsonl}\n"
        "rollout: {vllm: {sync_folder: ~/sync}}\nlaunch: {deepspeed: ~/zero.json}\n".replace(", eval_path: ~/rows.jsonl", ""),
    )
    config = RunConfig.compose(["~/home.yaml"], clip="fspo")
    paths = config.output, config.model.path, config.task.path, config.rollout.vllm.sync_folder, config.launch.deepspeed
    assert [*map(str, paths)] == [f"{tmp_path}/{name}" for name in ("run", "model", "rows.jsonl", "sync", "zero.json")]
    assert RunConfig(clip="fspo", output="~/x").output == tmp_path / "x"
    assert RunConfig.compose(clip="fspo", overrides=["output=~"]).output is None  # a lone ~ is null in YAML


def test_overrides_must_not_contradict_options():
    for overrides, settings in ((["seed=5"], {"seed": 0}), (["steps=7"], {"steps": 3}), (["clip.name=grpo"], {"clip": "fspo"})):
        with pytest.raises(UserError, match=r"already sets .*; use only one of the two"):
            RunConfig.compose(overrides=overrides, **settings)
    assert RunConfig.compose(overrides=["seed=5", "clip.name=grpo"], seed=5, clip="grpo", steps=3).seed == 5


def test_overrides_apply_to_the_final_part_in_any_order():
    for overrides in (["task.highest=50", "task.name=guess"], ["task.highest=50", "task=guess"]):
        for order in (overrides, overrides[::-1]):
            task = RunConfig.compose(clip="fspo", overrides=order).task
            assert (task.name, task.highest) == ("guess", 50)
    for order in (["clip=gspo", "clip.clip_high=0.3"], ["clip.clip_high=0.3", "clip=gspo"]):
        clip = RunConfig.compose(overrides=order).clip
        assert (clip.name, clip.clip_high) == ("gspo", 0.3)
    for order in (
        ["correction.high=3", "correction=tis", "correction.pool=sum"],
        ["correction={name: tis, high: 3, pool: sum}"],
    ):
        assert RunConfig.compose(clip="fspo", overrides=order).correction.high == 3
    given = RunConfig.compose(clip="fspo", overrides=["task.highest=50"], task={"name": "guess"}).task
    assert (given.name, given.highest) == ("guess", 50)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.hihgest=50", "task.name=guess"], "unknown key 'task.hihgest'"),
        (["task.highest=50", "task.name=arithmetic"], "unknown key 'task.highest'"),
        (["task.name=guess", "task.highest=50", "task.name=arithmetic"], "unknown key 'task.highest'"),
        (["clip=gspo", "clip.width_high=0.3"], "unknown key 'clip.width_high'"),
        (["clip.width_high=0.3", "clip=gspo"], "unknown key 'clip.width_high'"),
        (["correction.hihg=3", "correction=tis"], "unknown key 'correction.hihg'"),
        (["clip.advantage.wieght=3", "clip.advantage=gigpo"], "unknown key 'clip.advantage.wieght'"),
        (["learner.lora=null", "learner.lora.rank=4"], "lora=None contradicts another --set of a setting in lora"),
    ],
)
def test_an_override_that_the_final_part_does_not_have_is_refused(overrides, message):
    with pytest.raises(UserError, match=re.escape(message)):
        RunConfig.compose(overrides=overrides)


def test_a_setting_without_a_name_is_not_lost_to_a_later_name(tmp_path):
    (tmp_path / "own.yaml").write_text("model: {path: embedded}\ntask: {highest: 50}\n")
    assert RunConfig.compose([tmp_path / "own.yaml"], clip="fspo", overrides=["task.name=guess"]).task.highest == 50


def test_plugins_are_loaded_once_for_a_configuration():
    config = RunConfig.compose(clip="grpo")
    assert config.model_copy(update={"seed": 1}).plugins.zoo is config.plugins.zoo
    assert RunConfig.compose(clip="grpo", plugins=config.plugins).plugins.zoo is config.plugins.zoo
    assert RunConfig.compose(clip="grpo").plugins.zoo is not config.plugins.zoo


def test_a_single_config_needs_no_list():
    assert RunConfig.compose("guess") == RunConfig.compose(["guess"])
