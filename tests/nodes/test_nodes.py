"""A run on two machines equals one process, survives a bad network, and ends on both when one of them is lost.

The traffic between the machines is what the planner forecasts.
"""

import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import rlzoo
from rlzoo import RunConfig
from rlzoo.gate.architecture import find_architecture
from rlzoo.gate.devices import Devices
from rlzoo.gate.plan import Plan, Prompts
from rlzoo.models.pretrained import load_pretrained
from tests.nodes.machines import ADDRESSES, PORT, Machines, wait, why_not
from tests.training.short import QUICK, lines, without_times

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

SETTINGS = (*QUICK, "tracking.mlflow=false", "learner.lr=1e-3", "checkpoint.every=1", "task.reward=grade:grade")
GRADE = """
import os
import time

def grade(problem, response):
    time.sleep(float(os.environ.get("PAUSE", "0")))
    return float(response.endswith(problem.answer))
"""
QUESTION = '{{"question": "What is {} + 1?", "answer": "#### {}"}}\n'
STRATEGIES = {
    "plain": (),
    "zero2": ("launch.deepspeed=zero2",),
    "zero3": ("launch.deepspeed=zero3",),
    "fsdp": ("launch.fsdp=true",),
}
WRITES = {"plain": "optimizer.safetensors", "zero2": "deepspeed", "zero3": "deepspeed", "fsdp": "fsdp"}
"""What a checkpoint has from each strategy."""
ENDS_WITHIN = 60.0  # seconds


@pytest.fixture
def machines(tmp_path):
    made = Machines(tmp_path)
    for folder in made.folders:
        (folder / "grade.py").write_text(GRADE)
    yield made
    made.close()


def words(*overrides, steps=3, settings=SETTINGS):
    sets = [word for setting in (*settings, "launch.processes=2", *overrides) for word in ("--set", setting)]
    return ["--clip", "fspo", "--steps", str(steps), "--output", "run", *sets]


def resume(machines, steps=3, environment=()):
    """Resume the run, which is on machine 0; machine 1 needs its configuration."""
    (machines.folders[1] / "run").mkdir(exist_ok=True)
    (machines.folders[1] / "run" / "config.yaml").write_bytes((machines.folders[0] / "run" / "config.yaml").read_bytes())
    again = ["--resume", "--steps", str(steps), "--output", "run"]
    return [machines.rank(number, *again, environment=environment) for number in range(2)]


def ended_well(machines, processes):
    codes, _ = wait(processes)
    assert codes == [0, 0], [machines.log(number)[-3000:] for number in range(2)]


def weights(folder, step=3):
    tensors = load_file(folder / "run" / "checkpoints" / f"step-{step:06d}" / "model.safetensors")
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def metrics(folder):
    return without_times(lines(folder / "run" / "metrics.jsonl"))


def until_step(machines, step, limit=200):
    file, start = machines.folders[0] / "run" / "metrics.jsonl", time.monotonic()
    while not file.exists() or len(file.read_text().splitlines()) <= step:
        assert time.monotonic() - start < limit, machines.log(0)[-3000:]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """The folder of the same run in one process."""
    folder = tmp_path_factory.mktemp("one")
    (folder / "grade.py").write_text(GRADE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        rlzoo.train(RunConfig.compose(clip="fspo", overrides=SETTINGS, steps=3, output=folder / "run"))
    return folder


def test_three_steps_equal_one_process_and_resume_without_a_shared_file_system(machines, one_process, strategy):
    settings = STRATEGIES[strategy]
    ended_well(machines, [machines.rank(number, *words(*settings, steps=2)) for number in range(2)])
    assert {path.name for path in machines.folders[1].iterdir()} <= {"grade.py", "__pycache__"}
    ended_well(machines, resume(machines))
    state = machines.folders[0] / "run" / "checkpoints" / "step-000003" / "state"
    assert (state / WRITES[strategy]).exists()
    expected, got = weights(one_process), weights(machines.folders[0])
    assert float((got - expected).norm() / expected.norm()) < 1e-5
    for ours, theirs in zip(metrics(machines.folders[0]), metrics(one_process), strict=True):
        for name in ("reward/mean", "clip/fraction", "learner/grad_norm"):
            assert ours.get(name, 0.0) == pytest.approx(theirs.get(name, 0.0), rel=1e-4, abs=1e-6), name


def pytest_generate_tests(metafunc):
    marks = {"zero2": [pytest.mark.deepspeed], "zero3": [pytest.mark.deepspeed]}
    if "strategy" in metafunc.fixturenames:
        metafunc.parametrize("strategy", [pytest.param(name, marks=marks.get(name, [])) for name in STRATEGIES])


HASH = """
import hashlib

def grade(problem, response):
    return int(hashlib.sha256((problem.answer + response).encode()).hexdigest()[:6], 16) / 2**24
"""
"""A reward that differs between all responses, so that every response has a gradient, as the planner assumes."""


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A model with 4.7 million random weights; in the shipped model, ZeRO-3 would keep every tensor on both machines."""
    folder, tokenizer = tmp_path_factory.mktemp("larger"), load_pretrained("embedded")[1]
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8, "head_dim": 32}
    config = AutoConfig.for_model("qwen3", **sizes, num_key_value_heads=4, vocab_size=16, tie_word_embeddings=True)
    config.update({"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_planner_forecasts_the_bytes_on_the_cable(tmp_path, larger, strategy):
    usual = [word for word in SETTINGS if not word.startswith(("checkpoint", "eval"))]
    settings = (*usual, *STRATEGIES[strategy], "model.path=larger", "eval.num_problems=0")
    sent = {}
    for steps in (1, 3):  # the difference excludes the start and the end of the run
        machines = Machines(tmp_path / str(steps))
        for folder in machines.folders:
            (folder / "grade.py").write_text(HASH)
            shutil.copytree(larger, folder / "larger")
        ended_well(machines, [machines.rank(number, *words(steps=steps, settings=settings)) for number in range(2)])
        sent[steps] = machines.num_bytes()
        machines.close()
    config = RunConfig.compose(clip="fspo", overrides=[*usual, *STRATEGIES[strategy], "launch.processes=2"])
    plan = Plan(config, find_architecture(str(larger)), Devices("CPU", 2, 2**34, is_cpu=True), Prompts(20, True), processes=2)
    forecast, measured = 2 * plan.traffic, (sent[3] - sent[1]) / 2
    print(f"{strategy}: {measured:,.0f} bytes per step on the cable, {forecast:,.0f} forecast")
    assert forecast == pytest.approx(measured, rel=0.1)


def cable_is_cut_for_5_s(machines):
    machines.connect(is_up=False)
    time.sleep(5)
    machines.connect()


SURVIVED = {
    "a cable that is cut for 5 s": cable_is_cut_for_5_s,
    "20 % loss": lambda machines: machines.lose(0.2),
}


@pytest.mark.parametrize("fault", SURVIVED)
def test_a_bad_network_changes_no_number(machines, one_process, fault):
    processes = [machines.rank(number, *words(), environment={"PAUSE": "0.1"}) for number in range(2)]
    until_step(machines, 1)
    SURVIVED[fault](machines)
    ended_well(machines, processes)
    assert float((weights(machines.folders[0]) - weights(one_process)).norm() / weights(one_process).norm()) < 1e-5


@pytest.mark.parametrize("late", [0, 1])
def test_a_machine_that_starts_60_s_late_changes_no_number(machines, one_process, late):
    first = machines.rank(1 - late, *words())
    time.sleep(60)
    ended_well(machines, [first, machines.rank(late, *words())])
    assert float((weights(machines.folders[0]) - weights(one_process)).norm() / weights(one_process).norm()) < 1e-5


def test_a_clock_that_is_an_hour_ahead_changes_no_number(machines, one_process):
    # Python imports this file at its start
    (machines.folders[1] / "sitecustomize.py").write_text("import time\nnow = time.time\ntime.time = lambda: now() + 3600\n")
    ended_well(machines, [machines.rank(number, *words()) for number in range(2)])
    assert float((weights(machines.folders[0]) - weights(one_process)).norm() / weights(one_process).norm()) < 1e-5


def test_a_rank_that_grades_for_a_minute_is_not_lost(machines):
    slow = ["task.timeout=10", "eval.num_problems=0"]
    processes = [
        machines.rank(number, *words(*slow, steps=1), environment={"PAUSE": "4" * number or "0"}) for number in range(2)
    ]
    ended_well(machines, processes)


def cut(machines):
    machines.connect(is_up=False)


def kill(number):
    return lambda machines: machines.signal(number, signal.SIGKILL)


LOST = {"rank 0 is killed": kill(0), "rank 1 is killed": kill(1), "the cable is cut": cut}


@pytest.mark.parametrize("fault", LOST)
def test_when_a_rank_is_lost_the_run_ends_on_both_machines_and_resumes_bit_for_bit(machines, fault):
    processes = [machines.rank(number, *words(steps=3), environment={"PAUSE": "0.1"}) for number in range(2)]
    until_step(machines, 1)
    LOST[fault](machines)
    codes, seconds = wait(processes)
    print(f"{fault}: ended on both machines after {seconds:.0f} s")
    assert 0 not in codes
    assert seconds < ENDS_WITHIN
    told = [line for number in range(2) for line in machines.log(number).splitlines() if line.startswith("rlzoo: ")]
    assert any("machine-" in line or ADDRESSES[0] in line for line in told), told
    machines.kill()
    machines.connect()
    ended_well(machines, resume(machines))
    interrupted = weights(machines.folders[0]), metrics(machines.folders[0])
    (machines.folders[0] / "run").rename(machines.folders[0] / "interrupted")
    ended_well(machines, [machines.rank(number, *words()) for number in range(2)])
    assert torch.equal(weights(machines.folders[0]), interrupted[0])
    assert metrics(machines.folders[0]) == interrupted[1]


def other_version(folder):
    info = folder / "torch-9.9.dist-info"  # the folder is the first on the path
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n")


DIFFERENT = {
    "version of torch": other_version,
    "grade.py": lambda folder: (folder / "grade.py").write_text(GRADE + "\n# another version\n"),
    "training problems": lambda folder: (folder / "questions.jsonl").write_text(QUESTION.format(1, 2) * 30),
    "questions.jsonl": lambda folder: (folder / "questions.jsonl").unlink(),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_machines_that_differ_do_not_train(machines, what):
    task = ("task.name=math_file", "task.path=questions.jsonl", "task.reward=grade:grade")
    sets = words(*task, settings=[setting for setting in SETTINGS if not setting.startswith("task.")])
    for folder in machines.folders:
        (folder / "questions.jsonl").write_text("".join(QUESTION.format(number, number + 1) for number in range(30)))
    DIFFERENT[what](machines.folders[1])
    processes = [machines.rank(number, *sets) for number in range(2)]
    codes, seconds = wait(processes)
    print(f"different {what}: ended on both machines after {seconds:.0f} s")
    assert 0 not in codes
    assert seconds < ENDS_WITHIN
    for number in range(2):
        line = next(line for line in machines.log(number).splitlines() if line.startswith("rlzoo: "))
        assert what in line
        assert number or "machine-1" in line
    assert not (machines.folders[0] / "run").exists()


def test_sigterm_on_one_machine_saves_the_run(machines):
    processes = [machines.rank(number, *words(steps=50), environment={"PAUSE": "0.05"}) for number in range(2)]
    until_step(machines, 2)
    machines.signal(1, signal.SIGTERM)
    codes, seconds = wait(processes)
    print(f"SIGTERM: ended on both machines after {seconds:.0f} s")
    assert 0 not in codes
    done = len(metrics(machines.folders[0])) - 1
    assert (machines.folders[0] / "run" / "checkpoints" / f"step-{done:06d}").is_dir()
    assert f"stopped after step {done} of 50; resume with" in machines.log(0)
    ended_well(machines, resume(machines, steps=done + 1))


def test_accelerates_launcher_with_two_machines(machines, one_process):
    processes = [machines.rank(number, *words(), launcher=accelerate(number, "--multi_gpu")) for number in range(2)]
    ended_well(machines, processes)
    assert float((weights(machines.folders[0]) - weights(one_process)).norm() / weights(one_process).norm()) < 1e-5


def test_accelerates_launcher_for_cpus_is_refused(machines):
    processes = [machines.rank(number, *words(), launcher=accelerate(number, "--cpu")) for number in range(2)]
    assert 0 not in wait(processes)[0]
    assert "launch with --multi_gpu, which also works on CPUs, or with torchrun" in machines.log(1)


def accelerate(number, kind):
    group = ["--num_machines=2", "--num_processes=2", f"--machine_rank={number}", f"--main_process_ip={ADDRESSES[0]}"]
    plain = ["--mixed_precision=no", "--dynamo_backend=no", f"--main_process_port={PORT}"]
    return ["accelerate", "launch", kind, *group, *plain]
