"""A race tunes every rule alike, and its table follows from its records."""

import json
import os
import shutil
from pathlib import Path

import pytest

from rlzoo.config.run_config import RunConfig
from rlzoo.core.errors import RunError, UserError
from rlzoo.lab.race import admit, record_of
from rlzoo.lab.results import Record, Result, Standings, right_or_rewards
from rlzoo.lab.sweep import Child
from rlzoo.lab.track import Track, track_names

SMALL = """
about: a test
config:
  model: {path: embedded}
  task: {name: arithmetic, num_operands_max: 4}
  rollout: {num_prompts: 8, group_size: 4, max_new_tokens: 40}
  eval: {num_problems: 20, num_samples: 4}
  checkpoint: {every: 0}
  tracking: {mlflow: false}
  steps: 2
learning_rates: [1.0e-4, 3.0e-4, 9.0e-4]
tuning_seeds: [100, 101]
seeds: [200, 201, 202, 203, 204]
clip_fraction: 0.1
reference: grpo
"""


@pytest.fixture
def track(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(SMALL)
    return Track.read(str(file))


def result_of(track, rule, scores, rate=3e-4):
    def record(seed, learning_rate, score):  # of 10 problems with 4 responses each
        return Record(seed=seed, learning_rate=learning_rate, num_samples=4, start=0.5, right=f"{round(score * 4)}" * 10)

    tuning = [
        record(seed, learning_rate, 0.75 if learning_rate == rate else 0.5)
        for learning_rate in track.learning_rates
        for seed in track.tuning_seeds
    ]
    return Result(
        track=track.name,
        track_digest=track.digest,
        rule=rule,
        rule_hash="0",
        widths={},
        learning_rate=rate,
        tuning=tuning,
        runs=[record(seed, rate, score) for seed, score in zip(track.seeds, scores, strict=True)],
        evenness={},
        step_seconds=[2.0, 1.0, 3.0],
        reference_step_seconds=[1.0, 1.0, 1.0],
        facts={},
        processor="",
        date="2026-11-29",
        command="",
    )


def written(result, folder):
    file = folder / result.track / f"{result.rule}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(result.to_json())
    return file


def test_a_summary_follows_from_the_records_by_hand(track):
    runs = result_of(track, "fspo", [0.75, 0.75, 0.5, 0.25, 1.0]).runs
    failed = runs[0].model_copy(update={"failure": "the gradients are not finite", "right": ""})
    summary = result_of(track, "fspo", [0.75] * 5).model_copy(update={"runs": (failed, *runs[1:])}).summary()
    assert summary["reward"] == 0.5  # (0 + .75 + .5 + .25 + 1) / 5, because a failed run counts with a reward of 0
    assert summary["solved"] == 0.8  # every problem by four of five runs
    assert (summary["below_start"], summary["collapsed"]) == (2, 1)  # .25 is half of .5, not less
    assert (summary["learning_rate"], summary["loss_beside"], summary["at_edge"]) == (3e-4, 0.25, 0)
    assert summary["relative_step_time"] == 2.0


def test_rewards_that_are_not_0_or_1_are_stored_as_means():
    assert right_or_rewards([[1.0, 0.0, 1.0], [0.0, None, 0.0]])["right"] == "20"
    assert right_or_rewards([[0.5, 1.0], [0.25, 0.25]])["rewards"] == (0.75, 0.25)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"summary": {"reward": 0.9}}, "reward is 0.9, but its records give 0.75"),
        ({"track_digest": "1"}, "has changed since this result was made"),
        ({"runs": slice(1, None)}, "one run for each of the seeds"),
        ({"tuning": slice(1, None)}, "no tuning run with learning rate 0.0001 and seed 100"),
        ({"learning_rate": 1e-4}, "must use the best learning rate of the tuning, 0.0003"),
        ({"runs": "none"}, "runs"),
    ],
    ids=["summary", "track", "seed", "tuning", "rate", "type"],
)
def test_a_result_that_was_changed_is_refused_in_one_line(track, tmp_path, change, message):
    result = result_of(track, "grpo", [0.75] * 5)
    file = written(result, tmp_path)
    content = json.loads(file.read_text())
    for key, value in change.items():
        content[key] = content[key][value] if isinstance(value, slice) else value
        content[key] = json.loads(file.read_text())[key] | value if key == "summary" else content[key]
    if "summary" not in change and isinstance(content["runs"], list):
        content["summary"] = Result.model_validate({key: content[key] for key in content if key != "summary"}).summary()
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=message) as error:
        Standings.of(track, [tmp_path])
    assert "\n" not in str(error.value)


def test_the_table_says_what_can_and_cannot_be_told(track, tmp_path):
    for rule, scores in {"grpo": [0.5] * 5, "fspo": [0.75] * 5, "gspo": [0.75, 0.5, 0.75, 0.5, 0.5]}.items():
        written(result_of(track, rule, scores), tmp_path)
    standings = Standings.of(track, [tmp_path])
    assert [result.rule for result in standings.results] == ["fspo", "gspo", "grpo"]
    best, verdicts, _ = standings.sentences()
    assert best.startswith("2 of 3 rules cannot be distinguished from the best one: fspo, gspo")
    assert verdicts.startswith("Compared with grpo, shown to be better: 1; shown to be worse: 0")
    assert standings.line("gspo").startswith("small: mean reward 0.600 with learning rate 0.0003; minus grpo: +0.100 [-0.")
    assert standings.line("grpo") == "small: mean reward 0.500 with learning rate 0.0003"
    assert standings.line("rloo") is None


def test_only_an_error_of_the_run_counts_as_its_failure(track, tmp_path):
    config = RunConfig.compose(clip="grpo", seed=200, overrides=["tracking.mlflow=false"])
    child = Child("grpo-200", tmp_path / "grpo-200", config, ())
    log = tmp_path / "logs" / "grpo-200.log"
    log.parent.mkdir()
    log.write_text("step 3\nrlzoo: ten updates in a row were skipped: the gradient is not finite\n")
    assert record_of(child).failure == "ten updates in a row were skipped: the gradient is not finite"
    for text in ("", "step 3\n", "rlzoo: No space left on device: x (y); once that is fixed, run the same command again\n"):
        log.write_text(text)
        with pytest.raises(RunError, match="grpo-200 did not finish"):
            record_of(child)


def test_a_run_with_steps_in_which_every_advantage_was_0_has_a_record(tmp_path):
    config = RunConfig.compose(clip="grpo", seed=200, steps=4, overrides=["tracking.mlflow=false"])
    child = Child("grpo-200", tmp_path, config, ())
    rows = [{"step": step, "reward/mean": 0.5, "response/length_mean": 9.0, "response/truncated": 0.0} for step in range(5)]
    rows[2]["learner/entropy"] = 0.25
    for name, text in {
        "config.yaml": "",
        "summary.json": '{"finished": true}',
        "metrics.jsonl": "".join(json.dumps(row) + "\n" for row in rows),
        "evaluations/000004.json": '{"rewards": [[1.0, 0.0]]}',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert record_of(child).entropy == 0.25


def test_shipped_tracks_can_be_read_and_have_disjoint_seeds():
    tracks = [Track.read(name) for name in track_names()]
    assert tracks
    for one in tracks:
        assert not {*one.tuning_seeds} & {*one.seeds}
    with pytest.raises(UserError, match=r"no track 'sum'; did you mean 'sums'\?"):
        Track.read("sum")


@pytest.mark.long
def test_an_outsiders_rule_is_raced_shown_and_admitted(track, tmp_path, zygote):
    def rlzoo(*words):
        return zygote.run(*words, folder=tmp_path, environment=os.environ | {"COLUMNS": "200"})

    rule = tmp_path / "my_rule.py"
    shutil.copy(Path(__file__).parents[2] / "examples/rlzoo-soft-gate/rlzoo_soft_gate.py", rule)
    first = rlzoo("race", "run", "--track", "small.yaml", "--clip", f"grpo,{rule}")
    assert first.returncode == 0, first.stderr
    shown = json.loads(rlzoo("race", "show", "--track", "small.yaml", "--json").stdout)
    assert {row["rule"] for row in shown["rules"]} == {"grpo", "soft-gate"}
    results = {name: Result.read(tmp_path / f"races/small/{name}.json") for name in ("grpo", "soft-gate")}
    rule = rule.rename(tmp_path / "soft-gate.py")  # its name in docs/results
    rule.write_text(f"# words that change nothing\n{rule.read_text()}")
    admit(results["soft-gate"], track, [rule], [results["grpo"]])
    # the score of a run is that of the same run on its own
    run = tmp_path / "races/small/grpo/seeds" / "grpo-200"
    alone = rlzoo("train", "--config", str(run / "config.yaml"), "--output", "alone", "--set", "tracking.mlflow=false")
    assert alone.returncode == 0, alone.stderr
    evaluations = [json.loads((folder / "evaluations/000002.json").read_text()) for folder in (run, tmp_path / "alone")]
    assert evaluations[0] == evaluations[1]
    assert right_or_rewards(evaluations[0]["rewards"])["right"] == results["grpo"].runs[0].right
    other = results["grpo"].model_copy(update={"facts": results["grpo"].facts | {"model weights": "0"}})
    for changed, known, message in [
        (
            {"facts": results["soft-gate"].facts | {"learner.num_minibatches": 8}},
            results["grpo"],
            "learner.num_minibatches is 8",
        ),
        ({"rule_hash": "0"}, results["grpo"], "the code of the rule has changed"),
        ({}, other, "model weights is"),
    ]:
        with pytest.raises(UserError, match=message):
            admit(results["soft-gate"].model_copy(update=changed), track, [rule], [known])
