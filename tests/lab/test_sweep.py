"""A sweep runs every policy with every seed from the same start, resumes after an interruption, and is one run in MLflow."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import mlflow
import pytest

from rlzoo.core.errors import UserError
from rlzoo.gate.fingerprint import run_facts
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.lab.sweep import Sweep, parse_seeds, run_children, slots
from tests.cli.conftest import HOOK, SOUND

QUICK = ("rollout.num_prompts=8", "rollout.group_size=4", "task.num_operands_max=4", "rollout.max_new_tokens=20")
COMMAND = ["sweep", "--jobs", "2"]


def command(folder, *more, clip="fspo,grpo", seeds="1", steps=2, held_out=20):
    settings = [word for value in (*QUICK, f"eval.num_problems={held_out}") for word in ("--set", value)]
    return [*COMMAND, "--clip", clip, "--seeds", seeds, "--steps", str(steps), *settings, "--output", str(folder), *more]


@pytest.fixture(scope="module")
def run(zygote):
    """Run a sweep in its own process."""

    def run(arguments, where, store):
        environment = os.environ | {"MLFLOW_TRACKING_URI": store, "COLUMNS": "200"}
        return zygote.run(*arguments, folder=where, environment=environment)

    return run


@pytest.fixture(scope="module")
def swept(run, tmp_path_factory, empty_store):
    """A sweep of two policies: its folder, its store and its output."""
    where = tmp_path_factory.mktemp("sweep")
    shutil.copy(empty_store, where / "mlflow.db")
    store = f"sqlite:///{where}/mlflow.db"
    answer = run(command("race"), where, store)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return where / "race", store, answer.stdout


@pytest.mark.long
def test_every_policy_starts_from_the_same_model_and_the_same_responses(swept):
    folder, _, _ = swept
    first, second = (folder / name for name in ("fspo-0", "grpo-0"))
    texts = [(path / "rollouts" / "000001.jsonl").read_text() for path in (first, second)]
    sampled = [[json.loads(line) | {"clipped": None} for line in text.splitlines()] for text in texts]  # rules clip differently
    assert sampled[0] == sampled[1]
    start = [json.loads((path / "metrics.jsonl").read_text().splitlines()[0]) for path in (first, second)]
    assert start[0]["eval/accuracy"] == start[1]["eval/accuracy"]
    later = [(path / "rollouts" / "000002.jsonl").read_text() for path in (first, second)]
    questions = [[json.loads(line)["question"] for line in text.splitlines()] for text in later]
    assert questions[0] == questions[1]  # the same data order; the responses differ by then


@pytest.mark.long
def test_the_runs_of_a_sweep_have_names_and_tags(swept):
    folder, store, _ = swept
    client = mlflow.MlflowClient(store)
    runs = client.search_runs(["1"], f"tags.sweep = '{folder}'")
    assert sorted(run.info.run_name for run in runs) == ["fspo-0", "grpo-0"]
    assert (folder / "compare.html").is_file()
    for child in runs:
        assert child.info.status == "FINISHED"
        assert child.data.tags["rl_rule"] == child.data.params["clip.name"] == child.info.run_name.removesuffix("-0")
        assert {"reward/mean", "clip/fraction", "fairness/lre_max", "eval/accuracy"} <= set(child.data.metrics)
        unit = "_tokens" if child.info.run_name == "grpo-0" else ""  # grpo clips tokens
        assert {name for name in child.data.metrics if name.startswith("lre_")} >= {
            f"lre{unit}_at_0.1",
            f"lre_noise{unit}_at_0.1",
        }
        assert ("lre_at_0.1" in child.data.metrics) == (not unit)


@pytest.mark.long
def test_the_comparison_is_printed_and_two_runs_have_no_winner(swept):
    folder, _, printed = swept
    assert printed.startswith(f"2 runs in {folder.name}\n")
    assert "fspo" in printed
    assert "too few seeds" in printed


@pytest.mark.long
def test_a_restarted_sweep_keeps_finished_runs_and_accepts_more(run, swept):
    folder, store, _ = swept
    before = (folder / "fspo-0" / "summary.json").stat().st_mtime_ns
    answer = run(command("race", clip="fspo,grpo,gspo"), folder.parent, store)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert answer.stdout.startswith(f"3 runs in {folder.name}, 2 of them already finished\n")
    assert (folder / "fspo-0" / "summary.json").stat().st_mtime_ns == before
    assert (folder / "gspo-0" / "summary.json").exists()


@pytest.mark.long
def test_a_finished_run_of_another_configuration_is_not_reused(run, swept):
    folder, store, _ = swept
    answer = run(command("race", "--set", "learner.lr=5e-5"), folder.parent, store)
    assert answer.returncode == 2
    assert "has different settings: learner.lr (was 0.0003, now 5e-05)" in answer.stderr


@pytest.mark.long
def test_a_failed_run_is_reported_and_the_others_finish(run, tmp_path):
    plugin = tmp_path / "faulty.py"
    plugin.write_text(
        "from rlzoo import ClipPolicy, hookimpl\n"
        "class Faulty(ClipPolicy):\n"
        "    name, paper, scope = 'faulty', 'none', 'token'\n"
        "    def __call__(self, inputs):\n"
        "        raise ArithmeticError('no')\n"
        "@hookimpl\n"
        "def rlzoo_clip_policies():\n"
        "    return [Faulty]\n"
    )
    more = ["--plugin", str(plugin), "--set", "tracking.mlflow=false"]
    arguments = command("race", *more, clip="faulty,grpo", steps=1, held_out=0)
    answer = run(arguments, tmp_path, "")
    assert answer.returncode == 1
    assert "faulty-0 did not finish: see" in answer.stdout
    assert "raised ArithmeticError" in (tmp_path / "race" / "logs" / "faulty-0.log").read_text()
    assert re.search("faulty-0 ended with exit code 1  rule 'faulty' raised ArithmeticError", answer.stdout)
    assert json.loads((tmp_path / "race" / "grpo-0" / "summary.json").read_text())["finished"]


@pytest.mark.long
def test_a_half_created_run_restarts_and_a_deleted_run_is_reported(run, tmp_path):
    new = tmp_path / "race" / "grpo-0"
    (new / "checkpoints").mkdir(parents=True)
    (new / "run.json").write_text('{"id": "0123456789abcdef"}\n')
    plugin = tmp_path / "eraser.py"
    plugin.write_text(
        "import shutil\n"
        "from rlzoo import ClipPolicy, hookimpl, ops\n"
        "class Eraser(ClipPolicy):\n"
        "    name, paper, scope = 'eraser', 'none', 'token'\n"
        "    def __call__(self, inputs):\n"
        f"        shutil.rmtree({str(new)!r}, ignore_errors=True)\n"
        "        log_ratio = ops.log_ratio(inputs)\n"
        "        return ops.clipped_surrogate(log_ratio, inputs.advantages, ops.ratio_band(1.0, 1.0, None, like=log_ratio))\n"
        "@hookimpl\n"
        "def rlzoo_clip_policies():\n"
        "    return [Eraser]\n"
    )
    more = ["--plugin", str(plugin), "--set", "tracking.mlflow=false", "--jobs", "1"]
    answer = run(command("race", *more, clip="grpo,eraser", steps=1, held_out=0), tmp_path, "")
    assert "grpo-0 finished" in answer.stdout, answer.stdout + answer.stderr
    assert "grpo-0 did not finish, or was deleted: see" in answer.stdout
    assert answer.returncode == 1


@pytest.mark.long
def test_a_signalled_sweep_stops_its_children_and_resumes_later(run, zygote, tmp_path):
    store = f"sqlite:///{tmp_path}/mlflow.db"
    environment = os.environ | {"MLFLOW_TRACKING_URI": store}
    arguments = command("race", clip="grpo", steps=30, held_out=0)
    files = (os.devnull, tmp_path / "out", tmp_path / "err")
    process = zygote.start(*arguments, folder=tmp_path, files=files, environment=environment)
    metrics = tmp_path / "race" / "grpo-0" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert "; rerun the same command to resume it" in (tmp_path / "out").read_text()
    assert not json.loads((tmp_path / "race" / "grpo-0" / "summary.json").read_text())["finished"]
    assert run(arguments, tmp_path, store).returncode == 0
    assert json.loads((tmp_path / "race" / "grpo-0" / "summary.json").read_text())["finished"]
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(31))
    assert "stopped after step" in (tmp_path / "race" / "logs" / "grpo-0.log").read_text()
    client = mlflow.MlflowClient(store)
    shown = client.search_runs(["1"], f"tags.rl_rule = 'grpo' and tags.sweep = '{tmp_path / 'race'}'")
    assert [child.info.status for child in shown] == ["FINISHED"]  # one run that was resumed


def test_a_grid_makes_a_run_of_every_combination(tmp_path):
    sweep = Sweep(tmp_path, ("grpo", "gspo"), (3,), grid=("learner.lr=1e-4,2e-4", "learner.num_minibatches=2,4"))
    assert len(sweep.children) == 8
    child = sweep.children[1]
    assert child.name == "grpo-lr=1e-4-num_minibatches=4-3"
    assert (child.config.learner.lr, child.config.learner.num_minibatches, child.config.seed) == (1e-4, 4, 3)
    assert {child.config.steps for child in sweep.children} == {40}


@pytest.mark.parametrize("wrong", ["learner.lr", "=1", "learner.lr=", "learner.lr=,"])
def test_a_grid_that_cannot_be_read_is_refused(tmp_path, wrong):
    with pytest.raises(UserError, match="expected KEY=VALUE,VALUE"):
        Sweep(tmp_path, ("grpo",), (0,), grid=(wrong,))


def test_an_error_in_any_run_is_reported_before_the_first_starts(tmp_path):
    with pytest.raises(UserError, match="unknown rule 'gspoo'"):
        Sweep(tmp_path, ("grpo", "gspoo"), (0,))
    with pytest.raises(UserError, match=r"learner\.lr"):
        Sweep(tmp_path, ("grpo",), (0,), grid=("learner.lr=1e-4,-1",))
    assert not list(tmp_path.iterdir())


def test_seeds_are_a_number_or_a_list():
    assert parse_seeds("3") == (0, 1, 2)
    assert parse_seeds("101,102") == (101, 102)
    assert parse_seeds("7,") == (7,)
    for wrong in ("0", "-1", "", "a", "1,1", "1,b"):
        with pytest.raises(UserError, match="--seeds"):
            parse_seeds(wrong)


def test_without_a_gpu_the_cores_are_divided_among_runs():
    number = len(os.sched_getaffinity(0))
    assert [place["OMP_NUM_THREADS"] for place in slots(None)] == ["1"] * number
    assert [place["OMP_NUM_THREADS"] for place in slots(1)] == [str(number)]


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        (["seed=7,8"], {}, "seed=7: --seed or --seeds already sets seed to 0"),
        (["clip=gspo,rloo"], {}, "clip=gspo: --clip already sets clip to grpo"),
        (["output=left,right"], {}, "output=left: --output already sets output"),
        (["steps=2,3"], {"steps": 9}, "steps=2: --steps already sets steps to 9"),
        (["rollout.top_p=0.9", "rollout.top_p=0.8"], {}, "another --set or --grid sets rollout.top_p"),
        (["rollout.top_p=0.9,0.8"], {"overrides": ("rollout.top_p=1",)}, "another --set or --grid sets rollout.top_p"),
        (["rollout.top_k=5,5"], {}, "would have the same name"),
        (["learner.lr=1e-3,0.001"], {}, "run 'grpo-lr=0.001-0' has the same settings as another run"),
        (["checkpoint.every=5,10"], {}, "use distinct values of settings that affect training"),
        (["task=arithmetic,guess", "task.name=guess"], {}, "another --set or --grid sets task.name"),
        (["task.name=arithmetic,guess"], {"overrides": ("task.operand_max=5",)}, "unknown key 'task.operand_max'"),
    ],
)
def test_values_that_a_run_would_not_use_are_refused_in_a_grid(tmp_path, grid, options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Sweep(tmp_path, ("grpo",), (0,), grid=tuple(grid), **options)


def test_a_set_option_holds_for_every_task_of_a_grid(tmp_path):
    sweep = Sweep(tmp_path, ("grpo",), (0,), grid=("task.name=arithmetic,guess",), overrides=("task.timeout=7",))
    assert [(child.config.task.name, child.config.task.timeout) for child in sweep.children] == [
        ("arithmetic", 7), ("guess", 7)
    ]  # fmt: skip


def test_steps_are_an_axis_unless_an_option_sets_them(tmp_path):
    sweep = Sweep(tmp_path, ("grpo",), (0, 1), grid=("steps=5,6",))
    assert [(child.name, child.config.steps) for child in sweep.children[:2]] == [("grpo-steps=5-0", 5), ("grpo-steps=6-0", 6)]


def test_the_home_folder_is_expanded_in_the_path_of_a_sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (child,) = Sweep(Path("~/race"), ("grpo",), (0,)).children
    assert child.path == child.config.output == tmp_path / "race" / "grpo-0"


def small_sweep(folder):
    return Sweep(folder, ("fspo",), (0,), overrides=QUICK)


def test_a_sweep_is_continued_where_runs_cannot_be_tracked(tmp_path):
    (child,) = Sweep(tmp_path / "race", ("fspo",), (0,), overrides=QUICK).children
    RunDirectory.create(child.path, child.config.to_yaml(), (), run_facts(child.config)).close()
    (again,) = Sweep(tmp_path / "race", ("fspo",), (0,), overrides=(*QUICK, "tracking.mlflow=false")).children
    assert again.is_begun


def test_a_run_with_an_edited_reward_is_not_reused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = tmp_path / "swept_reward.py"
    reward.write_text("def score(problem, response):\n    return 1.0\n")
    overrides = (*QUICK, "task.reward=swept_reward:score")
    (child,) = Sweep(tmp_path / "race", ("fspo",), (0,), overrides=overrides).children
    RunDirectory.create(child.path, child.config.to_yaml(), (), run_facts(child.config)).close()
    assert Sweep(tmp_path / "race", ("fspo",), (0,), overrides=overrides).children[0].is_begun
    reward.write_text("def score(problem, response):\n    return 500.0\n")
    with pytest.raises(UserError, match=r"swept_reward\.py has changed since .*fspo-0' began; undo this"):
        Sweep(tmp_path / "race", ("fspo",), (0,), overrides=overrides)


def test_a_plugin_can_be_added_to_a_sweep_whose_runs_are_finished(tmp_path):
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text(SOUND + HOOK.format("Plain"))
    second.write_text((SOUND + HOOK.format("Plain")).replace('"plain"', '"other"'))
    (child,) = Sweep(tmp_path / "race", ("plain",), (0,), overrides=QUICK, plugins=(str(first),)).children
    RunDirectory.create(child.path, child.config.to_yaml(), (), run_facts(child.config)).close()

    def more():
        return Sweep(tmp_path / "race", ("plain", "other"), (0,), overrides=QUICK, plugins=(str(first), str(second)))

    with pytest.raises(UserError, match="has different settings: plugins"):  # the run would be resumed with another plugin
        more()
    (child.path / "metrics.jsonl").touch()
    (child.path / "summary.json").write_text(json.dumps({"finished": True, "steps": child.config.steps}))
    assert [one.is_begun for one in more().children] == [True, False]
    first.write_text(first.read_text() + "# edited\n")
    with pytest.raises(UserError, match=r"plugin first\.py has changed since .*plain-0' began"):
        more()
    first.rename(tmp_path / "renamed.py")
    with pytest.raises(UserError, match=r"plugin first\.py has changed since"):
        Sweep(tmp_path / "race", ("plain",), (0,), overrides=QUICK, plugins=(str(tmp_path / "renamed.py"),))


REWARD = """
import os
def reward(problem, response):
    with open("variable.txt", "a") as file:
        file.write(os.environ["OF_THE_TEST"])
    return len(response) % 7
"""


@pytest.mark.long
def test_a_forked_run_has_the_present_variables_and_equals_one_that_was_not_forked(tmp_path, zygote, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "noting.py").write_text(REWARD)
    overrides = (*QUICK, "eval.num_problems=0", "tracking.mlflow=false", "task.reward=noting:reward", "learner.lr=1e-2")
    for name in "ab":  # the fork server still has the variables of the first sweep
        monkeypatch.setenv("OF_THE_TEST", name)
        sweep = Sweep(tmp_path / name, ("fspo",), (0,), overrides=overrides, steps=2)
        assert run_children(sweep.children, lambda running: None, lambda child, code: None, jobs=1) == []
    assert set((tmp_path / "variable.txt").read_text()) == {"a", "b"}
    threads = slots(1)[0]
    words = ["train", "--clip", "fspo", "--steps", "2", "--output", "alone", *(f"--set={setting}" for setting in overrides)]
    done = zygote.run(*words, folder=tmp_path, environment=os.environ | threads)
    assert done.returncode == 0, done.stderr
    weights = "checkpoints/step-000002/model.safetensors"
    assert (tmp_path / "alone" / weights).read_bytes() == (tmp_path / "a" / "fspo-0" / weights).read_bytes()
    assert (tmp_path / "a" / "fspo-0" / weights).read_bytes() == (tmp_path / "b" / "fspo-0" / weights).read_bytes()
