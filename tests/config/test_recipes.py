"""The recipes for the papers' models compose with each of their rules, and every value names its source."""

import json
import re
from pathlib import Path

import pytest
import yaml

from rlzoo import RunConfig
from rlzoo.config.composition import config_folders, config_names, read_config
from rlzoo.gate.architecture import find_architecture
from rlzoo.gate.devices import parse_devices
from rlzoo.gate.plan import Plan, Prompts
from rlzoo.gate.settings import Start, check_settings, shortages
from rlzoo.gate.tokens import check_length

RECIPES = [name for name in config_names() if name.startswith("paper/")]
RULES = ("fspo", "gspo", "grpo", "rloo")
SOURCE = re.compile(r"# .*(arXiv \d{4}\.\d{5}|\bours\b|model card|config\.json of)")
# the layout of rows in BytedTsinghua-SIA/DAPO-Math-17k
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: $Answer "
    "(without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_row(number):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"{BEFORE}What is {number} + {number}?{AFTER}", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(2 * number), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"row-{number}"},
    }


@pytest.fixture
def data(tmp_path):
    """Settings that use local files instead of the hub's datasets."""
    pytest.importorskip("math_verify")
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("".join(json.dumps(dapo_row(number)) + "\n" for number in range(40)))
    test.write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
    return [f"task.path={train}", f"task.eval_path={test}"]


def test_the_recipes_are_found_by_their_names():
    assert RECIPES == ["paper/qwen3-1.7b", "paper/qwen3-8b"]
    assert read_config("paper/qwen3-8b")["model"]["path"] == "Qwen/Qwen3-8B-Base"


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_states_its_source(name):
    file = next(path for folder in config_folders() if (path := folder / f"{name}.yaml").is_file())
    lines = [line for line in file.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    values = [line for line in lines if not re.fullmatch(r"\s*[\w-]+:", line)]  # the other lines open a section
    for line in values:
        assert SOURCE.search(line), line
    assert len(values) == count(yaml.safe_load(file.read_text()))  # one value per line, so that every value has its own source


def count(content):
    return sum(count(value) for value in content.values()) if isinstance(content, dict) else 1


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_composes_for_every_rule_and_fits_its_machine(name, rule, data):
    config = RunConfig.compose([name], clip=rule, overrides=data)
    assert config.clip.name == rule
    stated = read_config(name)["per_clip"][rule]["clip"]
    assert stated.items() <= config.clip.model_dump().items()
    architecture, devices, prompts = find_architecture(config.model.path), parse_devices("8xH100"), Prompts(1024, False)
    check_settings(config, Start(8, here=False))
    check_length(prompts, config.rollout, limit=architecture.max_length, path=config.model.path)
    assert not list(shortages(Plan(config, architecture, devices, prompts, 8, is_here=False)))


def test_recipes_differ_only_in_model_and_sharding():
    small, large = (read_config(name) for name in RECIPES)
    assert small.pop("model") != large.pop("model")
    assert (small["launch"].pop("deepspeed"), large["launch"].pop("deepspeed")) == ("zero2", "zero3")
    assert small == large


def test_the_dapo_layout_is_read_and_its_prompt_wrapper_removed(data):
    task = RunConfig.compose(["paper/qwen3-1.7b"], overrides=data).task
    problems = task.train_problems(0, 39)
    assert {problem.question for problem in problems} == {f"What is {n} + {n}?" for n in range(40) if n != 1}  # 1 is held out
    assert {problem.answer for problem in problems if problem.question == "What is 7 + 7?"} == {"14"}
    assert task.prompt(problems[0]).endswith("\n\nPlease reason step by step, and put your final answer within \\boxed{}.")


def test_the_dapo_layout_is_read_with_repeated_questions(tmp_path, monkeypatch):
    pytest.importorskip("math_verify")
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "dapo"
    folder.mkdir()
    datasets.Dataset.from_list([dapo_row(number) for number in range(20)] * 3).to_parquet(folder / "train.parquet")
    test = tmp_path / "test.jsonl"
    test.write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
    task = RunConfig.compose(["paper/qwen3-1.7b"], overrides=[f"task.path={folder}", f"task.eval_path={test}"]).task
    assert len({problem.question for problem in task.train_problems(0, 19)}) == 19


def test_a_recipe_is_planned_from_the_command_line(data, zygote, tmp_path):
    command = ["train", "--config", "paper/qwen3-8b", "--clip", "gspo", "--dry-run", "--json", "--devices", "8xH100"]
    answer = zygote.run(*command, *(word for pair in data for word in ("--set", pair)), folder=tmp_path)
    assert answer.returncode == 0, answer.stderr
    plan = json.loads(answer.stdout)["plan"]
    assert plan["parameters"] == 8_190_735_360
    assert (plan["processes"], plan["zero_stage"]) == (8, 3)
    assert Path(tmp_path / "runs").exists() is False
