"""How a run is composed: which source takes precedence, and that config.yaml reproduces the run."""

import pytest
import yaml

from rlzoo import RunConfig, UserError, load_zoo
from rlzoo.config.composition import config_names, read_config


def write(path, text):
    path.write_text(text)
    return path


def test_later_sources_win(tmp_path):
    first = write(tmp_path / "first.yaml", "learner: {lr: 0.1, weight_decay: 0.1}\nsteps: 7\n")
    second = write(tmp_path / "second.yaml", "learner: {lr: 0.2}\n")
    config = RunConfig.compose([first, second], overrides=["learner.lr=0.3"], clip="grpo")
    assert (config.learner.lr, config.learner.weight_decay, config.steps) == (0.3, 0.1, 7)
    assert RunConfig.compose([first, second]).learner.lr == 0.2
    assert RunConfig.compose([first], steps=9).steps == 9


def test_default_run_lies_under_everything_that_names_no_model(tmp_path):
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


def test_config_yaml_gives_the_run_again(tmp_path):
    for name in ("fspo", "gspo", "grpo", "rloo"):
        config = RunConfig.compose(clip=name, seed=3, overrides=["learner.lr=1e-5", "task.num_operands_max=5"])
        file = write(tmp_path / f"{name}.yaml", config.to_yaml())
        assert RunConfig.compose([file]) == config


@pytest.mark.parametrize("text", ["[q_proj, mlp.up_proj]", "v_proj", r".*\.(k|v)_proj", "all-linear"])
def test_targets_of_an_adapter_survive_config_yaml(tmp_path, text):
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
def test_a_shipped_config_holds_only_what_differs_from_the_defaults(name):
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


def test_python_and_yaml_say_the_same():
    config = RunConfig(clip="fspo", task={"name": "arithmetic", "num_operands_max": 5}, steps=3)
    assert config.clip == load_zoo()["fspo"]()
    assert yaml.safe_load(config.to_yaml())["task"]["num_operands_max"] == 5


def test_python_mistakes_are_value_errors():
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
        ("clip: fspo\nsteps: 2001-99-99\n", "is not valid YAML"),
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


def test_odd_overrides_are_refused():
    for override in ("a." * 5000 + "a=1", "\ud800=1", "steps=" + "[" * 5000, "steps=0x" + "f" * 5000):
        with pytest.raises(UserError, match="--set"):
            RunConfig.compose(clip="fspo", overrides=[override])
