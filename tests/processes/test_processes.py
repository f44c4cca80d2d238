"""Two processes, started as on the command line, give the same rollouts, losses, gradient norms and weights as one."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlzoo import UserError
from rlzoo.config.run_config import RunConfig
from rlzoo.config.sections import LaunchConfig
from rlzoo.models.processes import deal, deepspeed_settings
from tests.off_policy import make_model
from tests.processes.worker import RULES, three_updates, with_unused_parts
from tests.training.short import lines, make_teacher

ROOT = Path(__file__).parents[2]
CASES = {
    **{rule: (rule, {}) for rule in RULES},
    "lora": ("fspo", {"lora": {"rank": 4}, "kl_coef": 0.1}),
    "teacher": ("grpo", {"teacher": True, "kl_coef": 0.1}),
    "prompts": ("grpo", {"clip": {"reduction": "prompt_mean"}, "kl_coef": 0.1}),
    "packed": ("gspo", {"packing": True, "gradient_checkpointing": True}),
    "critic": ("grpo", {"critic": True}),
    "unused": ("grpo", {"unused": True, "num_responses": 7}),
}
LAUNCHES = {
    "ddp": {},
    "fsdp": {"fsdp": True},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
    "offload": {"deepspeed": "zero3", "offload": "all"},
}
ON_A_CPU = {"ddp": {"ACCELERATE_USE_CPU": "true"}, "fsdp": {"ACCELERATE_USE_CPU": "true"}}


def environment(kind):
    told = ON_A_CPU.get(kind, {"DS_ACCELERATOR": "cpu"})
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **told, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}


def ranks(zygote, *words, folder, script=None, kind="ddp", timeout=280):
    """Run the command or a script in two processes of one training group, as a launcher would, but forked from the zygote."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    logs, processes = [folder / f"rank-{rank}.log" for rank in range(2)], []
    for rank, log in enumerate(logs):
        variables = environment(kind) | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        files = (os.devnull, log, log)
        processes.append(zygote.start(*words, folder=folder, files=files, environment=variables, script=script))
    codes = [process.wait(timeout) for process in processes]
    assert codes == [0, 0], [log.read_text() for log in logs]


def results(folder, cases):
    return {
        name: (json.loads((folder / f"{name}.json").read_text()), load_file(folder / f"{name}.safetensors")) for name in cases
    }


def launched(kind, folder, cases, timeout=280):
    """Run the worker in two processes of Accelerate's launcher; returns the results of each case."""
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    plain = ["--mixed_precision", "no", "--dynamo_backend", "no"]
    launch = json.dumps({"processes": 2, **LAUNCHES[kind]})
    worker = ["-m", "tests.processes.worker", str(folder), launch, json.dumps(cases)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, *plain, *worker]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(kind), timeout=timeout, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return results(folder, cases)


deepspeed = pytest.mark.deepspeed
SLOW = {"fsdp": pytest.mark.long, **dict.fromkeys(("zero2", "zero3", "offload"), deepspeed)}


@pytest.fixture(scope="module", params=["ddp", *(pytest.param(kind, marks=mark) for kind, mark in SLOW.items())])
def two_processes(request, zygote, tmp_path_factory):
    # DeepSpeed's optimizer for offloaded states rounds in another order, which shows in one case
    cases = dict(CASES) if request.param != "offload" else {"fspo": CASES["fspo"]}
    if "deepspeed" in LAUNCHES[request.param]:
        cases = {name: case for name, case in cases.items() if name != "unused"}
    cases, folder = {**cases, "few": ("fspo", {"num_responses": 15})}, tmp_path_factory.mktemp(request.param)
    if request.param != "ddp":
        return launched(request.param, folder, cases)
    launch = json.dumps({"processes": 2})
    ranks(zygote, folder, launch, json.dumps(cases), folder=folder, script=ROOT / "tests" / "processes" / "worker.py")
    return results(folder, cases)


@pytest.mark.parametrize("case", [*CASES, "few"])
def test_three_updates_agree_with_one_process(two_processes, case):
    if case not in two_processes:
        pytest.skip("one case is enough where the optimizer's states are offloaded, and DeepSpeed cannot train idle experts")
    updates, weights = two_processes[case]
    rule, settings = {**CASES, "few": ("fspo", {"num_responses": 15})}[case]
    expected, expected_weights = three_updates(rule, {}, **settings)
    for got, one in zip(updates, expected, strict=True):
        assert got["responses"] == one["responses"]
        assert got["skipped"] == one["skipped"]
        for name in ("objective", "grad_norm", "log_probs"):
            assert got[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7)
        for ours, theirs in zip(got["critic"], one["critic"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-7)
    assert weights.keys() == expected_weights.keys()
    start = (with_unused_parts(make_model()) if case == "unused" else make_model()).state_dict()
    start |= {f"critic.language_model.{name}": tensor for name, tensor in start.items()}
    start |= {
        name: torch.zeros_like(tensor) for name, tensor in expected_weights.items() if name not in start
    }  # the value head
    moved = torch.cat([(expected_weights[name] - start[name]).flatten() for name in weights])
    error = torch.cat([(weights[name] - expected_weights[name]).flatten() for name in weights])
    assert float(moved.norm()) > 1e-3
    # relative to how far they moved; relative to the weights themselves, a run without training would pass
    assert float(error.norm() / moved.norm()) < 1e-3
    whole = torch.cat([tensor.flatten() for tensor in expected_weights.values()])
    assert float(error.norm() / whole.norm()) < 1e-4


@deepspeed
def test_deepspeed_refuses_experts_that_processes_use_differently(tmp_path):
    with pytest.raises(AssertionError, match=r"UserError: launch.deepspeed: .* use launch.fsdp=true"):
        launched("zero2", tmp_path, {"unused": CASES["unused"]})


QUICK = ["rollout.num_prompts=7", "rollout.group_size=4", "task.num_operands_max=4", "rollout.max_new_tokens=20",
         "eval.num_problems=21", "learner.lr=1e-4", "tracking.mlflow=false"]  # fmt: skip


@pytest.fixture(scope="module")
def train(zygote):
    """Call `rlzoo train` in a separate process."""
    return partial(_train, zygote)


def words_of(folder, *options, overrides=QUICK, steps=2):
    settings = [part for override in overrides for part in ("--set", override)]
    return ["train", "--clip", "fspo", "--steps", steps, "--output", folder, *settings, *options]


def _train(zygote, kind, folder, *options, overrides=QUICK):
    words = words_of(folder, *options, overrides=overrides)
    told = {name: value for name, value in environment(kind).items() if name not in ON_A_CPU["ddp"]}
    return zygote.run(*words, folder=folder.parent, environment=told)


@pytest.fixture(scope="module")
def one_process(train, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    done = train("ddp", folder)
    assert done.returncode == 0, done.stderr
    return folder


def kind_of(options):
    return options[-1].removeprefix("--") if options else "ddp"


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


in_two = pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="ddp", marks=pytest.mark.long),
        pytest.param(("--fsdp",), id="fsdp", marks=pytest.mark.long),
        pytest.param(("--deepspeed", "zero2"), id="zero2", marks=deepspeed),
        pytest.param(("--deepspeed", "zero3"), id="zero3", marks=deepspeed),
    ],
)


@in_two
def test_a_whole_run_on_two_processes_equals_that_of_one(train, one_process, tmp_path, options):
    done = train(kind_of(options), tmp_path / "run", "--processes", "2", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 2/2") == 1  # only one process prints
    assert_same_run(tmp_path / "run", one_process)


@pytest.mark.long
def test_two_processes_compare_the_same_named_rewards_as_one_process(train, tmp_path):
    reward = '{"right": float(problem.answer in response), "short": 1 - len(response) / 100}'
    (tmp_path / "named_apart.py").write_text(f"def parts(problem, response):\n    return {reward}\n")
    overrides = [*QUICK, "task.reward=named_apart:parts", "clip.advantage=gdpo", "reward.weights.short=0.5"]
    assert_two_train_like_one(train, tmp_path, overrides)
    assert "reward/parts/right" in metrics(tmp_path / "two")[1]


@pytest.mark.long
def test_two_processes_choose_the_same_problems_in_a_band_as_one_process(train, tmp_path):
    rows = [{"question": f"{number}+{number}", "answer": str(2 * number)} for number in range(1, 11)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "by_parity.py").write_text("def reward(problem, response):\n    return float(int(problem.answer) % 4 == 0)\n")
    file = ["task.name=math_file", "task.path=sums.jsonl", "task.template='{question}='", "task.reward=by_parity:reward"]
    band = ["task.order=file", "rollout.band=[0,0.5]", "eval.num_problems=0"]
    overrides = [*(setting for setting in QUICK if not setting.startswith(("task.", "eval."))), *file, *band]
    assert_two_train_like_one(train, tmp_path, overrides)
    # 8+8 is held out; step 1 measures the first seven problems, and step 2 takes those never measured, those never right (1+1,
    # 3+3, 5+5 and 7+7), and the nearest of the others
    asked = {row["question"] for row in lines(tmp_path / "two" / "rollouts" / "000002.jsonl")}
    assert asked == {"9+9", "10+10", "1+1", "3+3", "5+5", "7+7", "2+2"}
    assert metrics(tmp_path / "two")[2]["rollout/measured"] == 9


@in_two
def test_two_processes_have_the_teacher_of_one_process(train, tmp_path, options):
    overrides = [*QUICK, "learner.kl_coef=0.1", f"model.reference={make_teacher(tmp_path / 'teacher')}"]
    assert_two_train_like_one(train, tmp_path, overrides, *options)
    assert metrics(tmp_path / "two")[2]["learner/kl_ref"] > 0


def assert_two_train_like_one(train, folder, overrides, *options):
    for name, kind, more in (("one", "ddp", ()), ("two", kind_of(options), ("--processes", "2", *options))):
        done = train(kind, folder / name, *more, overrides=overrides)
        assert done.returncode == 0, done.stderr
    assert_same_run(folder / "two", folder / "one")


def assert_same_run(ours, theirs):
    """Check that two runs of two steps have the same metrics, weights and responses."""
    for got, expected in zip(metrics(ours), metrics(theirs), strict=True):
        assert got.keys() >= expected.keys()
        for name, value in expected.items():
            if not name.startswith(("time/", "throughput/")):
                largest = 5e-5 if name == "mismatch/log_ratio_abs_max" else 1e-5  # the former is the largest rounding error
                assert got[name] == pytest.approx(value, rel=1e-3, abs=largest), name
    weights, expected_weights = (
        load_file(folder / "checkpoints" / "step-000002" / "model.safetensors") for folder in (ours, theirs)
    )
    for name in expected_weights:
        torch.testing.assert_close(weights[name], expected_weights[name], rtol=1e-4, atol=1e-6)
    assert (ours / "rollouts" / "000002.jsonl").read_text() == (theirs / "rollouts" / "000002.jsonl").read_text()


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--fsdp",), id="fsdp", marks=pytest.mark.long),
        pytest.param(("--deepspeed", "zero3"), id="zero3", marks=deepspeed),
    ],
)
def test_a_sharded_adapter_is_saved_whole(train, tmp_path, options):
    pytest.importorskip("peft")
    overrides = [*QUICK, "learner.lora.rank=4", "learner.lr=1e-3", "eval.num_problems=0"]
    runs = [tmp_path / "one", tmp_path / "two"]
    for folder, several in zip(runs, [(), ("--processes", "2", *options)], strict=True):
        done = train(kind_of(options), folder, *several, overrides=overrides)
        assert done.returncode == 0, done.stderr
    for file in ("model.safetensors", "adapter/adapter_model.safetensors"):
        expected, got = (load_file(folder / "checkpoints" / "step-000002" / file) for folder in runs)
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-6)


# the game that ships with the package; and one whose first problems, which belong to process 0, have one turn and whose last
# ones have six, or an environment that raises an error or hangs
PLAYED = {
    "guess": ["rollout.num_prompts=7", "rollout.group_size=4", "eval.num_problems=21", "learner.lr=1e-4"],
    "uneven": ["task.name=environment", "task.environment=tests.tasks.environments.games:Uneven", "task.timeout=2",
               "rollout.num_prompts=7", "rollout.group_size=4", "rollout.max_new_tokens=60", "eval.num_problems=0",
               "learner.lr=1e-4"],
}  # fmt: skip


@pytest.fixture(scope="module", params=["guess", pytest.param("uneven", marks=pytest.mark.long)])
def one_player(request, train, tmp_path_factory):
    """The options for playing, and the result of one process."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    options = ("--config", "guess") if request.param == "guess" else ()
    overrides = (*PLAYED[request.param], "tracking.mlflow=false")
    done = train("ddp", folder, *options, overrides=overrides)
    assert done.returncode == 0, done.stderr
    return options, overrides, folder


@in_two
def test_two_processes_play_and_learn_the_same_as_one_process(train, zygote, one_player, tmp_path, options):
    more, overrides, one = one_player
    several = ("--processes", "2", *more, *options)
    if options:
        done = train(kind_of(options), tmp_path / "run", *several, overrides=overrides)
        assert done.returncode == 0, done.stderr
    else:
        ranks(zygote, *words_of(tmp_path / "run", *several, overrides=overrides), folder=tmp_path)
    assert_same_run(tmp_path / "run", one)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "000001.jsonl").read_text().splitlines()]
    turns = [len(row["turns"]) for row in rows]
    if more:
        assert max(turns) > 6
        assert metrics(one)[1]["learner/grad_norm"] > 0
    else:
        assert turns[:12] == [1] * 12  # those of process 0
        assert max(turns[12:20]) == 6
        failures = {row["group"]: row["failure"] for row in rows if "failure" in row}
        assert failures.pop(5).startswith("ValueError: no such move (")
        assert failures == {6: "took longer than 2 s"}
        assert metrics(one)[2]["env/failed"] > 0


@pytest.mark.long
def test_an_environment_that_ends_one_process_ends_both(zygote, tmp_path):
    settings = [
        *PLAYED["uneven"],
        "task.environment=tests.tasks.environments.games:Leaver",
        "task.workers=0",
        "tracking.mlflow=false",
    ]
    words = ["train", "--processes", "2", "--output", "run", *(part for each in settings for part in ("--set", each))]
    told = {name: value for name, value in environment("ddp").items() if name not in ON_A_CPU["ddp"]}
    done = zygote.run(*words, folder=tmp_path, environment=told, timeout=600)
    assert done.returncode != 0
    assert not (tmp_path / "run" / "rollouts" / "000001.jsonl").exists()


@pytest.mark.long
def test_episodes_that_fail_on_one_process_alone_end_neither(zygote, tmp_path):
    settings = [*PLAYED["uneven"], "task.environment=tests.tasks.environments.games:Speechless", "tracking.mlflow=false"]
    words = ["train", "--processes", "2", "--output", "run", *(part for each in settings for part in ("--set", each))]
    told = {name: value for name, value in environment("ddp").items() if name not in ON_A_CPU["ddp"]}
    done = zygote.run(*words, folder=tmp_path, environment=told, timeout=600)
    assert done.returncode == 0
    assert "8 of 28 environments failed; the last failure: ValueError: reset returned no text" in done.stderr


def test_two_processes_when_one_was_started_is_reported_in_one_line(zygote, tmp_path):
    told = {"WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    words = ["train", "--processes", "2", "--output", "run"]
    done = zygote.run(*words, folder=tmp_path, environment={**environment("ddp"), **told})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("rlzoo: launch.processes=2, but the training group has size 1")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ("ACCELERATE_USE_FSDP", "rlzoo: the launcher's configuration asks for FSDP; remove it there, and pass --fsdp"),
        (
            "ACCELERATE_USE_DEEPSPEED",
            "rlzoo: the launcher's configuration asks for DeepSpeed; remove it there, and pass the stage",
        ),
    ],
)
def test_unsupported_launcher_settings_are_refused(zygote, tmp_path, asked, line):
    told = {**environment("ddp"), asked: "true"}
    words = ["train", "--output", "run", "--set", "tracking.mlflow=false"]
    done = zygote.run(*words, folder=tmp_path, environment=told)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(line)


@pytest.mark.long
def test_a_process_that_dies_ends_the_other_within_a_minute(zygote, tmp_path):
    words = words_of("run", "--processes", "2", overrides=[*QUICK, "eval.num_problems=0"], steps=500)
    os.mkfifo(tmp_path / "output")
    files = (os.devnull, tmp_path / "output", tmp_path / "errors")
    run = zygote.start(*words, folder=tmp_path, files=files, environment=environment("ddp"))
    with (tmp_path / "output").open() as printed:
        assert any("step 1/" in line for line in printed), "it ended before its first step"
        children = subprocess.run(["pgrep", "-P", str(run.pid)], capture_output=True, text=True, check=True).stdout.split()
        started = time.monotonic()
        os.kill(int(children[-1]), signal.SIGKILL)
        assert run.wait(timeout=60) == 128 + signal.SIGKILL
        assert time.monotonic() - started < 60


def test_rows_are_dealt_evenly_by_length():
    lengths = [9, 1, 8, 2, 7, 3, 6]
    # longest first, back and forth: 9 | 8, 7 | 6, 3 | 2, 1
    shares = deal(torch.arange(7), lengths, 2)
    assert [share.tolist() for share in shares] == [[0, 6, 5], [2, 4, 3, 1]]
    assert [len(share) for share in deal(torch.tensor([3]), lengths, 3)] == [1, 0, 0]


def test_deepspeed_settings_that_the_learner_determines_are_refused(tmp_path):
    pytest.importorskip("deepspeed")
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"}}))
    with pytest.raises(UserError, match="the file sets 'optimizer', which the learner's settings determine"):
        deepspeed_settings(LaunchConfig(deepspeed=str(file)), bf16=False, max_grad_norm=1.0)
    file.write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    assert deepspeed_settings(LaunchConfig(deepspeed=str(file)), bf16=True, max_grad_norm=None)["gradient_clipping"] == 0.0
    with pytest.raises(UserError, match=r"launch.deepspeed='zero4': no such file \(allowed: zero2, zero3, or a JSON file\)"):
        deepspeed_settings(LaunchConfig(deepspeed="zero4"), bf16=False, max_grad_norm=1.0)


def test_the_command_line_composes_what_the_processes_run():
    config = RunConfig.compose(clip="fspo", overrides=["launch.processes=2", "launch.deepspeed=zero3", "launch.offload=all"])
    assert RunConfig.model_validate(config.model_dump(mode="json")).launch == config.launch


MACHINES = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_GPU
num_machines: 2
num_processes: 2
machine_rank: {rank}
main_process_ip: 127.0.0.1
main_process_port: {port}
mixed_precision: "no"
"""


@pytest.mark.long
def test_two_launchers_with_a_config_file_form_one_run(one_process, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    settings = [part for override in (*QUICK, "launch.processes=2") for part in ("--set", override)]
    run = ["-m", "rlzoo", "train", "--clip", "fspo", "--steps", "2", "--output", str(tmp_path / "run"), *settings]
    launchers = []
    for rank in (0, 1):
        file = tmp_path / f"machine-{rank}.yaml"
        file.write_text(MACHINES.format(rank=rank, port=port))
        command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), *run]
        log = (tmp_path / f"machine-{rank}.log").open("w")
        with log:
            launchers.append(subprocess.Popen(command, cwd=tmp_path, env=environment("ddp"), stdout=log, stderr=log))
    codes = [launcher.wait(timeout=280) for launcher in launchers]
    assert codes == [0, 0], (tmp_path / "machine-0.log").read_text()
    for got, expected in zip(metrics(tmp_path / "run"), metrics(one_process), strict=True):
        for name in expected.keys() & {"reward/mean", "learner/grad_norm", "learner/objective", "eval/accuracy"}:
            assert got[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


@pytest.mark.long
def test_two_processes_with_a_queue_equal_one_process(train, tmp_path):
    """Background threads of both processes sample the batches of later steps, with copies of earlier weights."""
    overrides = [*QUICK, "rollout.max_staleness=2", "eval.every=2"]
    for name, options in (("one", ()), ("two", ("--processes", "2"))):
        done = train("ddp", tmp_path / name, *options, "--steps", "5", overrides=overrides)
        assert done.returncode == 0, done.stderr
    for step in range(1, 6):
        one, two = (lines(tmp_path / name / "rollouts" / f"{step:06d}.jsonl") for name in ("one", "two"))
        assert [row["response"] for row in two] == [row["response"] for row in one]
        assert [row["policy_version"] for row in two] == [row["policy_version"] for row in one]
    compared = ("learner/grad_norm", "mismatch/weight_mean", "rollout/staleness", "eval/accuracy")
    for got, expected in zip(metrics(tmp_path / "two"), metrics(tmp_path / "one"), strict=True):
        names = [name for name in compared if name in expected]  # not every step evaluates
        assert "rollout/staleness" in names or expected["step"] == 0  # step 0 only evaluates
        assert [name for name in compared if name in got] == names
        for name in names:
            assert got[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
