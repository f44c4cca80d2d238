"""Run directories: a torn or changed one is read, skipped with a note, or rejected by name."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from hypothesis import assume
from hypothesis import strategies as st

from rlzoo.cli.train import run_to_resume
from rlzoo.config.run_config import RunConfig
from rlzoo.gate.fingerprint import check_unchanged, run_facts
from rlzoo.journal.manifest import damage
from rlzoo.journal.run_directory import RunDirectory
from rlzoo.journal.state import RunState, newest_state
from rlzoo.journal.tracking.uploads import Upload, Uploaded, run_id_of, uploaded_to
from rlzoo.lab.compare import compare as compare_runs
from rlzoo.lab.reports import comparison_report
from rlzoo.lab.runs import find_runs
from tests.fuzz.law import SURFACES, held_to_the_law
from tests.fuzz.spoiled import ODD_TEXTS, holding, spoiled_bytes, spoiled_json, spoiled_trees

SURFACE = SURFACES["run directories"]


@pytest.fixture(scope="module")
def run(small_run, tmp_path_factory):
    """A copy of the run, to be damaged file by file."""
    folder = tmp_path_factory.mktemp("fuzz") / "runs" / "spoiled"
    shutil.copytree(small_run, folder)
    Upload.new("mine", "run", tags={}, params={"a": 1}).write(folder)
    Uploaded("x", run_id="y").write(folder, "sqlite:///x.db")
    return folder


@pytest.fixture(scope="module")
def scores(run, tmp_path_factory):
    """The run without its recordings, which have their own tests: only its scores are compared."""
    folder = tmp_path_factory.mktemp("fuzz") / "scores"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints", "*.safetensors"))
    return folder


def compare(folder):
    """Do what ``rlzoo compare`` does."""
    result = compare_runs([folder], match=None)
    json.dumps(result.as_dict(), allow_nan=False)
    for rule in result.rules:
        for record in rule.runs:
            run_id_of(record.path)
            assert record.seconds >= 0
    return result


def resume(folder):
    """Read what ``rlzoo train --resume`` reads before it loads a model."""
    config = RunConfig.compose(run_to_resume(folder))
    check_unchanged(config.model_copy(update={"output": folder}), run_facts(config))
    state = RunState.read(newest_state(folder))
    directory = RunDirectory(folder)
    try:
        directory.cut_after(state.step)
    finally:
        directory.close()


def restored(folder):
    """Restore the files that a case may change."""
    kept = {
        file: file.read_bytes() for pattern in ("*.yaml", "*.json*", "rollouts/*", "*/*.json") for file in folder.glob(pattern)
    }

    def restore():
        for file, content in kept.items():
            file.write_bytes(content)

    return restore


@held_to_the_law(
    "run directories", 0.25, data=st.data(), name=st.sampled_from(["config.yaml", "metrics.jsonl", "summary.json"])
)
def test_comparing_runs_with_corrupted_files(scores, data, name):
    file = scores / name
    with holding(file, data.draw(spoiled_bytes([file.read_bytes()]))):
        SURFACE.check(lambda: compare(scores), str(scores))


@held_to_the_law("run directories", 0.3, data=st.data(), name=st.sampled_from(["config.yaml", "summary.json"]))
def test_comparing_runs_with_changed_values(scores, data, name):
    file = scores / name
    good = file.read_bytes()
    if name == "config.yaml":
        text = yaml.safe_dump(data.draw(spoiled_trees([yaml.safe_load(good)])))
    else:
        text = json.dumps(data.draw(spoiled_trees([json.loads(good)])))
    with holding(file, text.encode()):
        SURFACE.check(lambda: compare(scores), str(scores))


@pytest.mark.filterwarnings("default")  # a figure's font lacks a glyph
@held_to_the_law("run directories", 0.05, data=st.data())
def test_comparing_a_corrupted_run_with_an_intact_one(scores, tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "two"
    shutil.rmtree(folder, ignore_errors=True)
    for seed in (0, 1):
        shutil.copytree(scores, folder / str(seed))
        settings = yaml.safe_load((scores / "config.yaml").read_text())
        settings = data.draw(spoiled_trees([settings])) if seed else settings
        (folder / str(seed) / "config.yaml").write_text(yaml.safe_dump(settings))

    def compare_both():
        comparison_report(compare(folder))

    SURFACE.check(compare_both, str(folder))


@held_to_the_law("run directories", 0.05, name=st.sampled_from(ODD_TEXTS) | st.text(max_size=20))
def test_names_of_run_directories(scores, name):
    assume(name.strip("./\0") or not name)  # with /, every folder would be searched
    SURFACE.check(lambda: find_runs([Path(name)]), "is not a folder", "no finished run")


@held_to_the_law("run directories", 0.15, data=st.data(), name=st.sampled_from(["config.yaml", "metrics.jsonl", "rollouts/x"]))
def test_resuming_corrupted_runs(run, data, name):
    restore = restored(run)
    file = run / name
    if name == "rollouts/x":
        file = file.with_name(
            data.draw(
                st.sampled_from(["000009.jsonl", "x.jsonl", "-1", "٣.jsonl", "1e5.safetensors", ".part", ".000009.jsonl.part"])
            )
        )
        file.write_bytes(b"")
    else:
        file.write_bytes(data.draw(spoiled_bytes([file.read_bytes()])))
    try:
        SURFACE.check(lambda: resume(run), str(run), *RunConfig.model_fields)
    finally:
        if name == "rollouts/x":
            file.unlink(missing_ok=True)
        restore()


@held_to_the_law("run directories", 0.1, data=st.data())
def test_resuming_corrupted_states(run, data):
    restore = restored(run)
    checkpoint = run / "checkpoints" / "step-000002"
    file = checkpoint / "state" / "state.json"
    good = file.read_bytes()
    file.write_bytes(data.draw(spoiled_json(good)))
    try:
        SURFACE.check(lambda: resume(run), str(run), *RunConfig.model_fields)
    finally:
        file.write_bytes(good)
        restore()


@held_to_the_law("run directories", 0.05, data=st.data())
def test_corrupted_manifests(run, data):
    checkpoint = run / "checkpoints" / "step-000001"
    file = checkpoint / "manifest.json"
    with holding(file, data.draw(spoiled_json(file.read_bytes()))):
        SURFACE.check(lambda: damage(checkpoint))


@held_to_the_law("run directories", 0.05, data=st.data(), name=st.sampled_from(["record.json", "sent.json"]))
def test_corrupted_tracking_records(run, data, name):
    (file,) = run.glob(f"*/{name}")
    with holding(file, data.draw(spoiled_json(file.read_bytes()))):
        SURFACE.check(lambda: (Upload.read(run), uploaded_to(run), run_id_of(run)), str(run))
