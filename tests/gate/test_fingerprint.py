"""A resumed run names everything that has changed since it was started and that decides its numbers."""

import json
import shlex
import shutil
import sys

import pytest
import yaml
from safetensors.torch import load_file, save_file

import rlzoo
from rlzoo import RunConfig, UserError
from rlzoo.gate.fingerprint import check_unchanged, model_facts, resume_command, run_facts
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.journal.state import read_fingerprint
from rlzoo.journal.tracking.uploads import Upload
from rlzoo.models.pretrained import load_named, local_model
from tests.rules import few
from tests.training.short import quick, resumes_after

GRADER = """
from pathlib import Path

from rlzoo.tasks import Task
from rlzoo.tasks.problem import Problem

from {package}.marks import FULL

ROWS = Path(__file__).with_name("rows.txt").read_text().split()


class Doubling(Task):
    def train_problems(self, start, count):
        return [Problem(ROWS[index % len(ROWS)], "4") for index in range(start, start + count)]

    def held_out_problems(self, count):
        return [Problem("7+7=", "14")][:count]

    def _grade(self, problems, responses):
        return [FULL * response.startswith(problem.answer) for problem, response in zip(problems, responses)]
"""
REWARD = """
def score(problem, response):
    from {package} import marks
    return marks.FULL * len(response)
"""
RULE = """
import json
from pathlib import Path
from rlzoo import ClipPolicy, hookimpl, ops

TABLE = json.loads((Path(__file__).parent / "table.json").read_text())


class {kind}(ClipPolicy):
    '''Does not clip.'''
    name, paper, scope = "{name}", "{paper}", "token"
    def __call__(self, inputs):
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)


@hookimpl
def rlzoo_clip_policies():
    return [{kind}]
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a package of the user's code, from which runs are started; returns the name of the package."""
    name = f"school_{tmp_path.name.rpartition('_')[2]}"
    package = tmp_path / name
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "marks.py").write_text("FULL = 1.0\n")
    (package / "rows.txt").write_text("\n".join(f"{n}+2=" for n in range(1000)))
    (package / "task.py").write_text(GRADER.format(package=name))
    (package / "reward.py").write_text(REWARD.format(package=name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield package
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        del sys.modules[module]


def started(folder, *overrides, clip="grpo", **settings):
    """Create the directory of a run without training."""
    config = quick(folder, clip=clip, overrides=["tracking.mlflow=false", *overrides], **settings)
    RunDirectory.create(folder, config.to_yaml(), config.plugins, run_facts(config)).close()
    return config


def edit(file, before, after):
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def refusal(config):
    with pytest.raises(UserError, match=r"^--resume: [^\n]*--allow-changed[^\n]*$") as refused:
        check_unchanged(config, run_facts(config))
    return str(refused.value)


@pytest.mark.parametrize(
    "setting",
    few([
        "rollout.temperature=0.7", "rollout.group_size=6", "rollout.max_new_tokens=5", "learner.max_grad_norm=0.5",
        "learner.weight_decay=0.2", "model.dtype=bfloat16", "eval.num_problems=3", "task.seed=5", "seed=9",
        "task.template='Now: {question}'", "clip.clip_high=0.3", "learner.kl_coef=0.01",
    ], 5),
)  # fmt: skip
def test_an_edited_setting_in_the_config_of_a_run_is_reported(tmp_path, setting):
    started(tmp_path / "run")
    key, _, value = setting.partition("=")
    file = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    *sections, name = key.split(".")
    section = content
    for part in sections:
        section = section[part]
    was, section[name] = section[name], yaml.safe_load(value)
    file.write_text(yaml.safe_dump(content))
    line = refusal(RunConfig.compose([file]))
    assert f"{key} changed from {was!r} to {section[name]!r}" in line


def test_another_rule_with_the_same_settings_is_reported(tmp_path):
    started(tmp_path / "run", "clip.clip_low=0.2", "clip.clip_high=0.2")
    file = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(file.read_text())
    content["clip"]["name"] = "gspo"
    file.write_text(yaml.safe_dump(content))
    assert refusal(RunConfig.compose([file])).startswith("--resume: clip.name changed from 'grpo' to 'gspo'; undo this")


def test_the_settings_that_may_change_are_reported_and_accepted(tmp_path):
    config = started(tmp_path / "run", steps=3)
    longer = config.model_copy(update={"steps": 5})
    assert check_unchanged(longer, run_facts(longer)) == [(20, "steps changed from 3 to 5")]
    config = started(tmp_path / "other", "learner.schedule=linear", steps=3)
    assert "steps changed from 3 to 5" in refusal(config.model_copy(update={"steps": 5}))


@pytest.mark.parametrize("changed", ["task.py", "marks.py", "rows.txt", "__init__.py"])
def test_an_edited_file_of_a_custom_task_is_reported(project, tmp_path, changed):
    config = started(tmp_path / "run", f"task.name={project.name}.task:Doubling")
    assert check_unchanged(config, run_facts(config)) == []
    with (project / changed).open("a") as file:
        file.write("\n# 900\n")
    assert f"{changed} has changed since the run started" in refusal(config)


@pytest.mark.parametrize("changed", ["reward.py", "marks.py"])
def test_an_edited_reward_or_lazily_imported_module_is_reported(project, tmp_path, changed):
    config = started(tmp_path / "run", f"task.reward={project.name}.reward:score")
    edit(project / changed, "FULL", "1 * FULL" if changed == "reward.py" else "HALF = FULL")
    assert f"file {changed} has changed since the run started" in refusal(config)


def test_an_edited_environment_is_reported(project, tmp_path):
    (project / "game.py").write_text("class Game:\n    def reset(self, problem, seed): ...\n    def step(self, message): ...\n")
    config = started(tmp_path / "run", "task.name=environment", f"task.environment={project.name}.game:Game", clip="rloo")
    edit(project / "game.py", "...", "return 1")
    assert "file game.py has changed since the run started" in refusal(config)


@pytest.mark.parametrize("changed", ["train", "eval"])
def test_an_edited_row_of_a_data_file_is_reported(tmp_path, changed):
    pytest.importorskip("math_verify")
    for name, first in (("train", 0), ("eval", 5000)):
        rows = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(first, first + 600)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"task.path={tmp_path / 'train.jsonl'}", f"task.eval_path={tmp_path / 'eval.jsonl'}"]
    config = started(tmp_path / "run", "task.name=math_file", *data, "rollout.max_new_tokens=10")
    edit(tmp_path / f"{changed}.jsonl", "599 + 1?", "599 + 1 ?")
    again = RunConfig.compose([tmp_path / "run" / "config.yaml"])
    assert f"file {tmp_path / changed}.jsonl has changed since the run started" in refusal(again)
    assert config.output == again.output


@pytest.fixture
def plugin(tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "table.json").write_text("[1, 2]")
    file = folder / "calm.py"
    file.write_text(RULE.format(kind="Calm", name="calm", paper="original"))
    return file


@pytest.mark.parametrize("changed", ["calm.py", "table.json"])
def test_an_edited_plugin_or_a_file_that_it_reads_is_reported(plugin, tmp_path, changed):
    config = started(tmp_path / "run", clip="calm", plugins=[plugin])
    with plugin.with_name(changed).open("a") as file:
        file.write(" ")
    kind = "plugin" if changed == "calm.py" else "file"
    assert f"{kind} {changed} has changed since the run started" in refusal(config)


def model_folder(folder):
    """A copy of the bundled model."""
    return shutil.copytree(local_model("embedded"), folder)


@pytest.mark.parametrize(
    ("name", "before", "after", "key"),
    [
        ("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05', "model configuration"),
        ("generation_config.json", '"eos_token_id": 1', '"eos_token_id": [1, 3]', "model configuration"),
        ("tokenizer.json", '"+": ', '"plus": ', "model tokenizer"),
        ("chat_template.jinja", "", "{{ messages[0]['content'] }} please", "model chat template"),
        ("model.safetensors", None, None, "model weights"),
    ],
)
def test_an_edited_base_model_is_reported_and_a_copy_is_accepted(tmp_path, name, before, after, key):
    def facts(folder):
        return model_facts(*load_named(RunConfig.compose(clip="grpo", overrides=[f"model.path={folder}"]).model))

    folder = model_folder(tmp_path / "model")
    original = facts(folder)
    if before is None:
        weights = load_file(folder / name)
        weights["model.layers.1.mlp.up_proj.weight"][17, 5] += 1e-3
        save_file(weights, folder / name, {"format": "pt"})
    elif before:
        edit(folder / name, before, after)
    else:
        (folder / name).write_text(after)
    changed = facts(folder)
    assert [name for name in original if original[name] != changed[name]] == [key]
    assert facts(model_folder(tmp_path / "copy")) == original


def test_a_changed_run_resumes_only_if_allowed(tmp_path):
    folder = model_folder(tmp_path / "model")
    first = rlzoo.train(quick(tmp_path / "run", steps=1, overrides=["tracking.mlflow=false", f"model.path={folder}"]))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    config = RunConfig.compose([first.path / "config.yaml"], steps=2, overrides=["learner.lr=5e-5", "clip.width_high=0.4"])
    with pytest.raises(
        UserError, match=r"clip\.width_high changed .*; learner\.lr changed .*; model chat template has changed"
    ):
        rlzoo.train(config, resume=True)
    with resumes_after(1, first.path):
        rlzoo.train(config, resume=True, allow_changed=True)
    assert read_fingerprint(first.path)["learner.lr"] == 5e-5
    policy = json.loads((first.path / "checkpoints" / "step-000002" / "clip.json").read_text())
    assert policy["width_high"] == 0.4
    with pytest.raises(
        UserError, match=r"learner\.lr changed from 5e-05 to 0\.0001"
    ):  # the settings in config.yaml are the first
        rlzoo.train(RunConfig.compose([first.path / "config.yaml"], steps=3), resume=True)
    *_, width, rate, steps = shlex.split(resume_command(first.path, read_fingerprint(first.path)))[::2]
    assert (width, rate, steps) == ("clip.width_high=0.4", "learner.lr=5e-05", "steps=2")
    changed = RunConfig.compose([first.path / "config.yaml"], overrides=[width, rate, steps])
    assert check_unchanged(changed, run_facts(changed)) == []


@pytest.mark.long
def test_a_moved_run_without_its_plugin_resumes_with_the_copy(plugin, tmp_path):
    plugin.write_text(plugin.read_text().replace('json.loads((Path(__file__).parent / "table.json").read_text())', "[]"))
    first = rlzoo.train(quick(tmp_path / "run", clip="calm", plugins=[plugin], steps=1, overrides=["tracking.mlflow=false"]))
    plugin.unlink()
    moved = first.path.rename(tmp_path / "moved")
    config = RunConfig.compose([moved / "config.yaml"], steps=2, output=moved)
    assert config.plugins == (str(moved / "plugins" / "calm.py"),)
    with resumes_after(1, moved):
        rlzoo.train(config, resume=True)


def test_an_adaptive_rule_keeps_its_settings(tmp_path):
    config = started(tmp_path / "run", clip="fspo-adaptive")
    changed = config.model_copy(update={"clip": config.clip.model_copy(update={"width_high": 0.9})})
    with pytest.raises(UserError, match=r"clip\.width_high changed from .* to 0\.9; undo this, or start a new run"):
        check_unchanged(changed, run_facts(changed), allow_changed=True)


@pytest.mark.parametrize("now", ["launch.processes=1", "launch.deepspeed=zero3"])
def test_the_files_of_deepspeed_need_the_same_processes_and_stage(tmp_path, now):
    before = ["launch.deepspeed=zero2", "launch.processes=2"]
    started(tmp_path / "run", *before)
    changed = quick(tmp_path / "run", clip="grpo", overrides=["tracking.mlflow=false", *before, now])
    key, value = now.split("=")
    with pytest.raises(UserError, match=f"{key} changed from .* to '?{value}'?; undo this, or start a new run"):
        check_unchanged(changed, run_facts(changed), allow_changed=True)


@pytest.mark.long
def test_a_changed_run_is_a_new_run_in_mlflow(tmp_path):
    first = rlzoo.train(quick(tmp_path / "run", steps=1))
    record = Upload.read(first.path)
    config = RunConfig.compose([first.path / "config.yaml"], steps=2, overrides=["learner.lr=5e-5"])
    rlzoo.train(config, resume=True, allow_changed=True)
    assert Upload.read(first.path).id != record.id
