"""Runs are read, labelled by what differs, and compared by the numbers in their files."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mlflow import MlflowClient

from rlzoo import load_zoo
from rlzoo.core.errors import UserError
from rlzoo.journal.tracking.uploads import Uploaded, tracking_uri
from rlzoo.lab.compare import ComparedRule, Comparison, compare, labelled, other_differences
from rlzoo.lab.comparison_tracking import log_comparison
from rlzoo.lab.recorded import RecordedRun
from rlzoo.lab.replay import replay
from rlzoo.lab.runs import find_runs, resolved_settings
from rlzoo.measure.comparison import differences, estimate
from tests.quick import quick_run


def variant(source, folder, **changes):
    """Copy a run directory with another seed or setting, as if it had been run that way."""
    shutil.copytree(source, folder)
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    for key, value in changes.items():
        section, _, name = key.rpartition("__")
        (settings[section] if section else settings)[name] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    start = json.loads((folder / "run.json").read_text())
    start["fingerprint"] |= {key.replace("__", "."): value for key, value in changes.items()}
    (folder / "run.json").write_text(json.dumps(start))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory, trained):
    """Two policies with two seeds each, and one run that was stopped."""
    folder = tmp_path_factory.mktemp("races")
    variant(trained.path, folder / "fspo-0")
    quick_run(folder / "grpo-0", "grpo", steps=4)
    for name in ("fspo", "grpo"):
        variant(folder / f"{name}-0", folder / "deeper" / f"{name}-1", seed=1)
    broken = variant(trained.path, folder / "fspo-2", seed=2)
    (broken / "summary.json").write_text(json.dumps({"finished": False}))
    return folder


def test_runs_are_found_at_any_depth_and_unfinished_ones_are_reported(folder):
    records, notes = find_runs([folder, folder / "fspo-0"])
    assert sorted((record.policy, record.seed) for record in records) == [("fspo", 0), ("fspo", 1), ("grpo", 0), ("grpo", 1)]
    assert notes == [f"skipped because it is not finished: {folder / 'fspo-2'}"]


def test_a_run_that_was_resumed_with_more_steps_is_finished(trained, tmp_path):
    copy = shutil.copytree(trained.path, tmp_path / "run")
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("steps: 4", "steps: 3"))  # its original number of steps; its summary says 4
    (record,), notes = find_runs([copy])
    assert notes == []
    assert record.settings["steps"] == 4


@pytest.mark.long
def test_scores_fairness_and_costs_are_those_of_the_runs(folder, trained):
    result = compare([folder], match=0.1)
    (fspo,) = [rule for rule in result.rules if rule.label == "fspo"]
    rewards = [row["reward/mean"] for row in trained.metrics[1:]]
    assert fspo.score.mean == pytest.approx(rewards[-1])  # the last quarter of four steps; there is no evaluation
    assert result.metric == "reward/mean"
    assert fspo.mean("clip/fraction") == pytest.approx(sum(row["clip/fraction"] for row in trained.metrics[1:]) / 4)
    run = RecordedRun.read(trained.path)
    own = replay(run, run.own_rule).profile
    assert sum(fspo.profile.both.count) == 2 * sum(own.both.count)
    assert fspo.profile.both.fraction == pytest.approx(own.both.fraction)
    assert [profile.clip_fraction for profile in fspo.matched.values()] == pytest.approx([0.1, 0.1], abs=0.02)
    (pair,) = result.pairs
    assert pair.num_seeds == 2
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["contenders"][0]["runs"][0]["finished"]


def test_runs_of_one_policy_with_different_settings_are_distinguished(folder, tmp_path, trained):
    fast = variant(trained.path, tmp_path / "fast", learner__lr=1e-3, seed=0)
    groups = labelled(find_runs([folder / "fspo-0", fast, folder / "grpo-0"])[0])
    assert sorted(groups) == ["fspo learner.lr=0.0003", "fspo learner.lr=0.001", "grpo"]


def test_of_equal_runs_in_a_folder_the_newest_counts(tmp_path, trained):
    names = ("newest", "oldest", "older")  # in the order of their paths, the newest is neither the first nor the last
    for name, clock in zip(names, (2e9, 0.0, 1e9), strict=True):
        run = variant(trained.path, tmp_path / "runs" / f"{len(name)}-{name}")
        rows = [
            json.loads(line) | {"time/clock": clock, "reward/mean": clock}
            for line in (run / "metrics.jsonl").read_text().splitlines()
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = compare([tmp_path / "runs"])
    assert [run.path.name for run in result.rules[0].runs] == ["6-newest"]
    assert result.rules[0].score.mean == 2e9
    assert sorted(note.partition(" is a newer run of ")[2] for note in result.notes) == ["fspo with seed 0"] * 2
    named = compare([tmp_path / "runs", tmp_path / "runs" / "6-oldest"])  # only one of them is named
    assert [run.path.name for run in named.rules[0].runs] == ["6-newest"]


def test_a_setting_that_changed_when_a_run_was_resumed_is_reported(folder, tmp_path, trained):
    begun = variant(trained.path, tmp_path / "begun", seed=5)
    resumed = variant(begun, tmp_path / "resumed", learner__lr=1e-3)
    shutil.copy(begun / "config.yaml", resumed)  # it holds the settings from the start of the run
    _, *notes = compare([folder, resumed]).notes
    assert notes == [f"{resumed}: learner.lr changed when the run was resumed (--allow-changed)"]


def test_runs_of_different_tasks_are_reported_as_not_comparable(folder, tmp_path, trained):
    other = variant(trained.path, tmp_path / "other", rollout__num_prompts=99, task__num_operands_max=3, seed=5)
    _, *notes = compare([folder, other]).notes
    assert notes == [
        "not comparable: task.num_operands_max differs between the runs (20, 3)",
        "the rule is not the only difference: rollout.num_prompts differs between the runs (12, 99)",
    ]


def test_tracking_settings_and_missing_settings_make_no_variant(folder, tmp_path, trained):
    tracked = variant(trained.path, tmp_path / "tracked", tracking__mlflow=True, checkpoint__keep=7, seed=5)
    older = variant(trained.path, tmp_path / "older", seed=6)
    settings = yaml.safe_load((older / "config.yaml").read_text())
    del settings["rollout"]["dynamic_sampling"], settings["reward"]
    (older / "config.yaml").write_text(yaml.safe_dump(settings))
    result = compare([folder, tracked, older], match=None)
    assert {rule.label for rule in result.rules} == {"fspo", "grpo"}
    assert [note for note in result.notes if "skipped" not in note] == []


def test_a_run_given_by_two_paths_is_counted_once(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert len(find_runs([Path("fspo-0"), folder / "fspo-0", folder / "deeper" / ".." / "fspo-0"])[0]) == 1


def test_the_score_is_accuracy_only_where_every_run_has_it(folder, tmp_path):
    evaluated = tmp_path / "grpo"
    shutil.copytree(folder / "grpo-0", evaluated)
    rows = [json.loads(line) for line in (evaluated / "metrics.jsonl").read_text().splitlines()]
    rows[0]["eval/accuracy"], rows[-1]["eval/accuracy"] = 0.25, 0.75
    (evaluated / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    alone = compare([evaluated], match=None)
    assert (alone.metric, alone.rules[0].score.mean, alone.rules[0].gain) == ("eval/accuracy", 0.75, 0.5)
    both = compare([evaluated, folder / "fspo-0"], match=None)
    assert both.metric == "reward/mean"
    (grpo,) = [rule for rule in both.rules if rule.label == "grpo"]
    assert grpo.score.mean == rows[-1]["reward/mean"]


def test_a_run_without_its_last_steps_is_unfinished_despite_its_summary(folder, tmp_path, trained):
    short = variant(trained.path, tmp_path / "short")
    summary = json.loads((short / "summary.json").read_text())
    (short / "summary.json").write_text(json.dumps(summary | {"steps": 80}))
    none = variant(trained.path, tmp_path / "none")
    (none / "summary.json").write_text("null")
    foreign = tmp_path / "foreign"
    (foreign / "rollouts").mkdir(parents=True)
    (foreign / "config.yaml").write_text("[no: yaml")
    records, notes = find_runs([tmp_path])
    assert [record.path for record in records] == [none]
    assert notes == [f"skipped because it is not finished: {foreign}", f"skipped because it is not finished: {short}"]
    rows = [json.loads(line) for line in (none / "metrics.jsonl").read_text().splitlines()]
    spent = sum(row["time/rollout"] + row["time/learner"] for row in rows[1:])
    assert records[0].seconds == pytest.approx(spent)


def test_folders_without_a_finished_run_are_refused(tmp_path, folder):
    with pytest.raises(UserError, match="no finished run in"):
        compare([tmp_path])
    with pytest.raises(UserError, match="is not a folder"):
        compare([tmp_path / "none"])
    with pytest.raises(UserError, match="no finished run in"):
        compare([folder / "fspo-2"])


def test_a_run_without_recordings_is_compared_by_its_score_alone(folder, tmp_path):
    for name in ("fspo", "grpo"):
        shutil.copytree(folder / f"{name}-0", tmp_path / name)
        for file in (tmp_path / name / "rollouts").glob("*"):
            file.unlink()
    result = compare([tmp_path])
    assert [rule.profile for rule in result.rules] == [None, None]
    assert len(result.pairs) == 1


def test_a_damaged_run_is_left_out_with_a_note(folder, tmp_path, trained):
    for name, line in {"torn": '{"step": 4, "rew', "no-step": "{}"}.items():
        damaged = variant(trained.path, tmp_path / name, seed=7)
        with (damaged / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")
    _, *notes = compare([folder, tmp_path]).notes
    assert [note.partition(" line 6: ")[2] for note in notes] == [
        "{} is not an object of metrics with an integer 'step'",
        "not JSON: Unterminated string starting at at column 13",
    ]
    with pytest.raises(UserError, match=r"no finished run in .* \(skipped because it is damaged: "):
        compare([tmp_path / "torn"])


def test_a_long_setting_gives_a_label_of_bounded_length(tmp_path, trained):
    long = variant(trained.path, tmp_path / "long", task__template="{question}" + "?" * 5000)
    groups = labelled(find_runs([trained.path, long])[0])
    assert max(map(len, groups)) < 120


def rule(label, errors, *, clips_parts=False):
    matched = {seed: SimpleNamespace(lre_max=error, lre_noise=0.02) for seed, error in enumerate(errors)}
    return ComparedRule(label, (), estimate([0.5] * len(errors)), None, matched, clips_parts)


def highlights(*rules, notes=()):
    pairs = differences({each.label: dict.fromkeys(each.matched, 0.5) for each in rules})
    return Comparison(rules, tuple(pairs), "eval/accuracy", 0.1, notes).highlights


def test_the_most_even_rule_is_reported_with_the_rules_it_significantly_beats():
    flat, even = rule("flat", [0.11, 0.13, 0.12, 0.14, 0.12]), rule("even", [0.02, 0.03, 0.02, 0.04, 0.02])
    near = rule("near", [0.021, 0.029, 0.022, 0.039, 0.02])
    assert highlights(flat, even)[1] == "Most even at clip fraction 0.1: even, lre 0.026 (more even than flat; noise 0.020)."
    assert highlights(near, even)[1] == "Most even at clip fraction 0.1: even, lre 0.026 (no difference shown; noise 0.020)."
    few = [rule("flat", [0.11, 0.13]), rule("even", [0.02, 0.03])]
    assert len(highlights(*few)) == 1  # too few seeds to say so


def test_rules_that_clip_tokens_are_not_called_more_even_than_rules_that_clip_responses():
    first, second = rule("fspo", [0.05, 0.06, 0.05, 0.06, 0.05]), rule("gspo", [0.08, 0.09, 0.08, 0.09, 0.08])
    tokens = rule("grpo", [0.01, 0.02, 0.01, 0.02, 0.01], clips_parts=True)
    _, *found = highlights(first, second, tokens)
    assert found == [
        "Most even of the rules that clip whole responses at clip fraction 0.1: fspo, lre 0.054 "
        "(more even than gspo; noise 0.020).",
        "Do not compare the length errors of rules that clip tokens or turns (grpo) with the others.",
    ]
    *_, last, _ = highlights(first, second, tokens, rule("cispo", [0.03, 0.04, 0.03, 0.04, 0.03], clips_parts=True))
    assert last.startswith("Most even of the rules that clip tokens or turns at clip fraction 0.1: grpo, lre 0.014")
    assert len(highlights(first, tokens)) == 2


def test_no_best_rule_is_named_among_runs_that_are_not_comparable():
    notes = ("not comparable: steps differs between the runs (3, 40)",)
    found = highlights(rule("fspo", [0.05, 0.06]), rule("gspo", [0.08, 0.09]), notes=notes)
    assert found[0] == "No best rule is named, because the runs are not comparable."


def test_a_rule_that_clips_tokens_is_recognised_from_its_decisions(folder):
    assert {each.label: each.clips_parts for each in compare([folder]).rules} == {"fspo": False, "grpo": True}


def test_a_rule_that_clipped_nothing_in_training_is_recognised_at_the_matched_clip_fraction(folder, tmp_path):
    inert = variant(folder / "grpo-0", tmp_path / "inert", clip__clip_low=0.99, clip__clip_high=99.0)
    (rule,) = compare([inert], match=0.1).rules
    assert rule.profile.clip_fraction == 0
    assert rule.clips_parts


def test_minibatches_that_the_rule_determines_are_a_difference(folder, tmp_path, trained):
    by_groups = variant(trained.path, tmp_path / "real-0")
    settings = yaml.safe_load((by_groups / "config.yaml").read_text())
    settings["clip"] = {"name": "real", "advantage": "group_mean", "reduction": "sequence_mean"}
    assert settings["learner"]["minibatch_by"] is None
    (by_groups / "config.yaml").write_text(yaml.safe_dump(settings))
    notes = other_differences([record.settings for record in find_runs([folder, by_groups])[0]])
    assert notes == [
        "the rule is not the only difference: learner.minibatch_by differs between the runs (responses, prompts)",
        "the rules differ in clip.advantage (group_norm, group_mean)",
    ]


def test_other_data_under_the_same_name_is_a_difference(tmp_path, trained):
    settings = {"task": {"name": "math_file", "path": "rows.jsonl"}}
    for number, digest in enumerate(("aa", "bb")):
        run = variant(trained.path, tmp_path / f"run-{number}", seed=number)
        config = yaml.safe_load((run / "config.yaml").read_text()) | settings
        (run / "config.yaml").write_text(yaml.safe_dump(config))
        facts = {"file rows.jsonl": digest, "file helper.py": digest}  # a rule's own code may differ
        (run / "run.json").write_text(json.dumps({"id": "0", "fingerprint": facts}))
    notes = other_differences([record.settings for record in find_runs([tmp_path])[0]])
    assert notes == ["the rule is not the only difference: file rows.jsonl differs between the runs (aa, bb)"]


def test_a_null_minibatch_setting_equals_the_choice_of_the_rule(folder, tmp_path, trained):
    explicit = variant(trained.path, tmp_path / "explicit", learner__minibatch_by="responses", seed=5)
    records, _ = find_runs([folder, explicit])
    assert other_differences([record.settings for record in records]) == []
    assert set(labelled(records)) == {"fspo", "grpo"}


def test_a_setting_that_is_a_mapping_in_some_runs_is_a_difference(folder, tmp_path, trained):
    corrected = variant(trained.path, tmp_path / "corrected", correction={"name": "tis", "pool": "sum", "high": 2.0}, seed=5)
    (note,) = other_differences([record.settings for record in find_runs([trained.path, corrected])[0]])
    assert note.startswith("the rule is not the only difference: correction differs between the runs (None, {")
    task = {"name": "environment", "environment": "my_game:Game"}
    easy, hard = ({"task": {**task, "arguments": arguments}} for arguments in ({}, {"board": {"size": 9}}))
    notes = other_differences([resolved_settings(easy, load_zoo()), resolved_settings(hard, load_zoo())])
    assert notes == ["not comparable: task.arguments differs between the runs ({}, {'board': {'size': 9}})"]


def test_runs_in_the_home_folder_are_found(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert len(find_runs([Path("~") / folder.name])[0]) == 4
    assert RecordedRun.read(Path("~") / folder.name / "fspo-0").num_responses > 0


@pytest.mark.long
def test_a_comparison_is_logged_for_the_runs_that_mlflow_still_has(folder, tmp_path, monkeypatch, caplog):
    copy = shutil.copytree(folder, tmp_path / "runs")
    result = compare([copy], match=0.1)
    client = MlflowClient(tracking_uri())
    experiment = client.create_experiment("races")
    run_ids = []
    for run in (run for rule in result.rules for run in rule.runs):
        run_ids.append(client.create_run(experiment).info.run_id)
        Uploaded("", run_ids[-1]).write(run.path, tracking_uri())
        Uploaded("", run_ids[-1]).write(run.path, "http://127.0.0.1:9")
    client.delete_run(run_ids[0])
    log_comparison(result)
    logged = [client.get_run(run_id).data.metrics.keys() & {"lre_at_0.1", "lre_tokens_at_0.1"} for run_id in run_ids]
    assert [len(names) for names in logged] == [0, *(1 for _ in logged[1:])]
    assert caplog.records == []
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    log_comparison(result)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("MLflow at http://127.0.0.1:9 cannot be used (")
    assert line.endswith("; the comparison was not logged")
