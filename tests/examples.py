"""Runs the examples that need only rlzoo's requirements, each in an empty folder: ``python -m tests.examples``.

``--jobs N`` runs N examples at once. Examples that read a run get a
short one, and the example that reads another trainer's dump a small one. All are forked from one process that has imported
everything (`tests.zygote`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.zygote import Zygote

FOLDER = Path(__file__).resolve().parents[1] / "examples"
LIMIT = 300.0
"""Time limit for one example in seconds."""
RUN = ["--clip", "gspo", "--steps", "12", "--set", "eval.num_problems=20", "--set", "rollout.num_prompts=16"]
"""Options of `rlzoo train` for the run that examples read; it is longer than the ten steps that some of them skip."""
EXAMPLES = {
    "convert_dump.py": "DUMPS rollouts --temperature 0.7",
    "custom_reward.py": "",
    "custom_task.py": "",
    "quickstart.py": "",
    "show_completions.py": "RUN --step 1 --number 2",
    "clip_by_length.py": "RUN clip-by-length.svg",
    "lab/adaptive_bound.py": "RUN",
    "lab/evenness.py": "RUN --skip-steps 2 --jobs 1",
    "lab/evenness_picture.py": "DOCS/explanation/which-rule-wins/evenness.csv evenness.svg",
    "lab/headlines.py": "DOCS/explanation/which-rule-wins",
    "lab/interval_coverage.py": "--draws 2 --only mean@4",
    "lab/length_law.py": "--output law --quick",
    "lab/length_law_fit.py": "DOCS/explanation/which-rule-wins/length-law.csv",
    "lab/make_embedded_model.py": "--steps 20 --output model",
    "lab/make_guess_model.py": "--steps 20 --output model",
    "lab/make_long_model.py": "--steps 20 --output model",
    "lab/measure_boundary.py": "fspo",
    "lab/measure_display.py": "RUN",
    "lab/measure_log_probs.py": "--model embedded --rows 2 --tokens 32",
    "lab/measure_planner.py": "--quick",
    "lab/measure_turns.py": "",
    "lab/mismatch_by_length.py": "RUN",
    "lab/pooled_fairness.py": "RUN --clip fspo,gspo",
    "lab/replay_memory.py": "--steps 2 --gigabytes 0.01",
    "lab/summarise_runs.py": "RUN",
    "lab/terminal_picture.py": "terminal.svg",
    "lab/tool_curve.py": "RUN tools.svg",
    "write_rollouts.py": "000001.safetensors",
}
"""Examples and their arguments: RUN is a run, DUMPS a folder with a dump, DOCS the folder docs."""
NEEDS = {
    "bench/": "TRL, and a machine that does nothing else: nox -s bench",
    "gpu/": "minutes even in small: nox -s gpu -- --device cpu --quick",
    "judge_reward.py": "a server with a model that judges; tests/tasks/test_async_grading.py has a small one",
    "lab/critic_worth.py": "hours",
    "lab/embedded_card.py": "make_embedded_model.py, which imports it",
    "lab/grade_references.py": "the extra math-verify, and the suites' questions",
    "lab/length_law_picture.py": "the folder examples on the path: python -m examples.lab.length_law_picture",
    "lab/length_law_texts.py": "the folder examples on the path; tests/lab/test_length_law.py runs it",
    "lab/recurrence.py": "nothing to run: the task of make_long_model.py",
    "lab/measure_long_model.py": "a model of make_long_model.py that has learned when to end",
    "lab/measure_staleness.py": "a vLLM server, and half an hour",
    "lab/measure_vllm.py": "vLLM",
    "lab/reasoning_law.py": "the folder examples on the path; tests/lab/test_length_law.py runs it",
    "lab/models.py": "the folder examples on the path; tests/lab/test_models.py runs it",
    "lab/small_models.py": "models.py, which imports it",
    "lab/episode_picture.py": "a finished run of the config guess",
    "lab/race_turns.py": "an hour",
    "lab/reproduce.py": "minutes even with --quick: python -m examples.lab.reproduce --quick",
    "prime_rl_loss.py": "prime-rl; tests/downstream/test_prime_rl.py calls it",
    "replay_and_plot.ipynb": "Jupyter: nox -s examples",
    "replay_on_ray.py": "a Ray cluster: nox -s nodes",
    "rlzoo-sandbox/": "to be installed: nox -s environments",
    "rlzoo-soft-gate/": "to be installed: nox -s outside_plugin",
    "tinker_loss.py": "Tinker: nox -s downstream",
    "trl_fspo.py": "TRL: nox -s downstream",
    "write_served.py": "vLLM: nox -s vllm",
}
"""Examples, or folders of examples, that are not run, and what they need."""


def nemo_rl_rows() -> list[dict[str, list[object]]]:
    """Return rows as NeMo-RL logs them, padded to 6 tokens: two responses to the prompt 7 8, and one to the prompt 9.

    The first response has two turns, which the environment's token 5 separates.
    """
    lengths = [5, 3, 3]
    columns = {
        "token_ids": [[7, 8, 3, 5, 4, 0], [7, 8, 6, 0, 0, 0], [9, 2, 1, 0, 0, 0]],
        "token_loss_mask": [[0, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]],
        "generation_logprobs": [[0, 0, -1.0, 0, -2.0, 0], [0, 0, -3.0, 0, 0, 0], [0, -4.0, -5.0, 0, 0, 0]],
        "prev_logprobs": [[0, 0, -1.5, 0, -2.5, 0], [0, 0, -3.5, 0, 0, 0], [0, -4.5, -5.5, 0, 0, 0]],
        "advantages": [[1.0] * 6, [-1.0] * 6, [0.5] * 6],
        "rewards": [1.0, 0.0, 2.0],
        "input_lengths": lengths,
        "sample_loss_mask": [1.0, 1.0, 1.0],
    }
    return [{key: [values[row]] for key, values in columns.items()} for row in range(len(lengths))]


def write_dump(file: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write one step of a dump, one JSON object per line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({**row, "idx": index}) + "\n" for index, row in enumerate(rows)), encoding="utf-8")


def found() -> list[str]:
    """Return all examples: scripts and notebooks."""
    files = [path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.suffix in (".py", ".ipynb")]
    return sorted(name for name in files if not name.startswith(".") and "/." not in name)


def unnamed() -> list[str]:
    """Return examples that are neither run nor listed with what they need, and listed names without an example."""
    files = found()
    folders = tuple(name for name in NEEDS if name.endswith("/"))
    missing = [name for name in files if name not in EXAMPLES | NEEDS and not name.startswith(folders)]
    gone = [
        name
        for name in (*EXAMPLES, *NEEDS)
        if not any(file == name or file.startswith(f"{name.rstrip('/')}/") for file in files)
    ]
    return missing + gone


def run_example(name: str, run: Path, zygote: Zygote) -> bool:
    """Run an example in an empty folder and print its time; prints its output if it failed."""
    text = EXAMPLES[name]
    for word, path in {"RUN": run, "DUMPS": run.with_name("dumps"), "DOCS": FOLDER.parent / "docs"}.items():
        text = text.replace(word, str(path))
    arguments = shlex.split(text)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rlzoo-example-") as folder:
        try:
            done = zygote.run(*arguments, script=FOLDER / name, folder=folder, timeout=LIMIT)
        except TimeoutError as error:
            print(f"{name}: {error}", flush=True)
            return False
    problem = f"FAILED (exit code {done.returncode})" if done.returncode else "ran"
    print(f"{problem} {name} in {time.monotonic() - start:.1f} s", flush=True)
    if done.returncode:
        print(done.stdout + done.stderr, flush=True)
    return not done.returncode


def main() -> int:
    """Run all examples; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlzoo-examples-") as folder, ThreadPoolExecutor(options.jobs) as pool:
        run = Path(folder) / "run"
        zygote = Zygote()
        write_dump(run.with_name("dumps") / "train_data_step1.jsonl", nemo_rl_rows())
        made = zygote.run("train", *RUN, "--set", "tracking.mlflow=false", "--output", run, folder=folder)
        assert made.returncode == 0, made.stdout + made.stderr
        ran = list(pool.map(lambda name: run_example(name, run, zygote), EXAMPLES))
        zygote.close()
    print(f"{len(ran)} examples; failed: {ran.count(False)}")
    return 0 if all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
