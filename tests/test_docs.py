"""The documentation agrees with the code: generated parts, code and config blocks, metrics, names of tests."""

import ast
import doctest
import importlib
import inspect
import json
import pkgutil
import re
from pathlib import Path

import pytest
import yaml

import rlzoo
from examples.bench.page import page as performance_page
from rlzoo import RunConfig, load_zoo
from rlzoo.config.composition import config_names, read_config
from rlzoo.core.errors import UserError
from rlzoo.testing import check

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "plugins").glob("*/README.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PLUGINS_MAY_IMPORT = {"__future__", "collections", "dataclasses", "math", "pydantic", "rlzoo", "torch", "typing"}
OVERLAYS = [name for name in config_names() if name not in load_zoo() and "model" not in read_config(name)]
MODULES = [module.name for module in pkgutil.walk_packages(rlzoo.__path__, "rlzoo.") if module.name != "rlzoo.__main__"]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_generated_parts_are_up_to_date(zygote):
    answer = zygote.run("--check", folder=ROOT, script=ROOT / "docs" / "scripts" / "generate.py")
    assert answer.returncode == 0, f"run python -m docs.scripts.generate for: {answer.stdout}{answer.stderr}"


@pytest.mark.parametrize("name", list(load_zoo()))
def test_the_metrics_to_watch_exist(name):
    metrics = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    watch = load_zoo()[name].watch
    assert watch
    for metric in watch:
        documented = re.sub(r"clip/setting_.*", "clip/setting_<name>", metric)
        assert f"`{documented}`" in metrics, metric


def test_bundled_rules_import_only_public_names_and_rlzoo_imports_no_plugin():
    for source in sorted({Path(inspect.getfile(policy)) for policy in load_zoo().values()}):
        for module in imports(source):
            assert module.split(".")[0] in PLUGINS_MAY_IMPORT, f"{source.parent.name} imports {module}"
            assert module == "rlzoo" or not module.startswith("rlzoo."), f"{source.parent.name} imports {module}"
    for source in sorted((ROOT / "rlzoo").rglob("*.py")):
        for module in imports(source):
            assert not module.startswith("rlzoo_"), f"{source.name} imports {module}"


def imports(source):
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "."


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_page_of_an_overlay_shows_its_settings(name):
    (block,) = blocks(ROOT / "docs" / "overlays" / f"{name}.md", "yaml")
    assert yaml.safe_load(block) == read_config(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_config_blocks_validate(page, tmp_path):
    for index, block in enumerate(blocks(page, "yaml")):
        file = tmp_path / f"{index}.yaml"
        file.write_text(block)
        content = yaml.safe_load(block)
        assert isinstance(content, dict)
        clip = content.get("clip")  # a block for one policy is validated with that one
        named = clip.get("name") if isinstance(clip, dict) else clip
        for name in [named] if named else load_zoo():
            RunConfig.compose([file], clip=name)


def test_the_policy_in_the_readme_keeps_the_laws():
    block = next(block for block in blocks(ROOT / "README.md", "python") if "class Flat" in block)
    names = {}
    exec(block, names)
    (policy,) = names["rlzoo_clip_policies"]()
    assert {outcome.status for outcome in check(policy())} == {"pass"}, check(policy())


def test_the_tests_that_pages_name_exist():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    for name in re.findall(r"`(test_\w+)`", (ROOT / "docs" / "explanation" / "mistakes.md").read_text()):
        assert any(f"def {name}(" in source for source in sources), name


SHAPED = ["reward.kl_coef=0.1", "reward.overlong_buffer=0.5", "rollout.dynamic_sampling=1", "clip.advantage=batch_norm"]


@pytest.mark.parametrize(("clip", "more"), [("fspo", ["learner.kl_coef=0.1"]), ("grpo", SHAPED)])
def test_metrics_page_names_every_metric(tmp_path, clip, more):
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text().replace("<k>", "0")
    overrides = ["rollout.num_prompts=4", "task.num_operands_max=3", "rollout.max_new_tokens=12", "eval.num_problems=4"]
    overrides += [*more, "tracking.mlflow=false"]
    metrics = rlzoo.train(RunConfig.compose(clip=clip, overrides=overrides, steps=1, output=tmp_path)).metrics[1]
    if more is SHAPED:
        assert {"reward/shaped_mean", "reward/kl", "rollout/rounds", "rollout/dropped_groups"} <= set(metrics)
    for name in metrics.keys() - {"step"}:
        assert f"`{re.sub(r'bin_[1-5]', 'bin_0', name)}`" in page, name


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name):
    try:
        module = importlib.import_module(name)
    except (ImportError, UserError) as error:
        if not name.startswith("rlzoo.integrations."):
            raise
        pytest.skip(str(error))  # the other trainer is not installed
    results = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0


def test_quickstart_runs(zygote, tmp_path):
    answer = zygote.run(folder=tmp_path, script=ROOT / "examples" / "quickstart.py")
    assert answer.returncode == 0, answer.stderr
    assert all(name in answer.stdout for name in load_zoo())


def test_the_page_of_speeds_is_generated_from_its_data():
    reports = json.loads((ROOT / "docs" / "reference" / "performance.json").read_text(encoding="utf-8"))
    assert performance_page(reports) == (ROOT / "docs" / "reference" / "performance.md").read_text(encoding="utf-8")
