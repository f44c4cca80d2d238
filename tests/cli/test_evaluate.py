"""`rlzoo eval` on the command line: tables, JSON, Ctrl-C and resume, and one line for every mistake."""

import json
import os
import signal
import time

import pytest

QUICK = ("--suite", "arithmetic", "--k", "4", "--max-new-tokens", "64", "--set", "rollout.batch_size=4")


def test_eval_prints_tables_and_the_same_command_only_reads_them(rlzoo, tmp_path):
    arguments = ("eval", "embedded", *QUICK, "--limit", "5", "--output", tmp_path / "mine")
    code, out, err = rlzoo(*arguments)
    assert code == 0, err
    assert "arithmetic 5/5  mean@4" in out
    for word in ("pass@1", "pass@2", "pass@4", "maj@4", "95 %", "MLflow run"):
        assert word in out
    code, out, _ = rlzoo(*arguments, "--json")
    assert code == 0
    found = json.loads(out)
    assert found == json.loads((tmp_path / "mine" / "results.json").read_text())
    suite = found["suites"]["arithmetic"]
    assert list(suite["estimates"]) == ["mean@4", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert found["settings"]["rollout"]["group_size"] == 4


def test_eval_without_mlflow_and_without_an_output(rlzoo, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")
    code, out, _ = rlzoo("eval", "embedded", *QUICK, "--limit", "1", "--no-mlflow")
    assert code == 0
    assert "MLflow" not in out
    assert not (tmp_path / "none.db").exists()
    rlzoo("eval", "embedded", *QUICK, "--limit", "1", "--no-mlflow", "--temperature", "0.5")
    assert len(list((tmp_path / "here" / "evals").glob("embedded-*/results.json"))) == 2


@pytest.mark.long
def test_eval_interrupted_by_ctrl_c_is_resumed_by_the_same_command(rlzoo, zygote, tmp_path):
    arguments = ["eval", "embedded", *QUICK, "--limit", "24", "--no-mlflow"]
    folder = tmp_path / "stopped"
    lines = folder / "completions" / "arithmetic.jsonl"
    files = (os.devnull, tmp_path / "out", tmp_path / "err")
    process = zygote.start(*arguments, "--output", folder, folder=tmp_path, files=files)
    while process.poll() is None and (not lines.exists() or lines.read_bytes().count(b"\n") < 2):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    out, err = (file.read_text() for file in files[1:])
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert f"stopped; the evaluation is in {folder}; rerun the same command to resume it" in out
    kept = lines.read_bytes()
    assert 2 <= kept.count(b"\n") < 24
    assert rlzoo(*arguments, "--output", folder)[0] == 0
    assert rlzoo(*arguments, "--output", tmp_path / "whole")[0] == 0
    assert lines.read_bytes().startswith(kept)
    assert lines.read_bytes() == (tmp_path / "whole" / "completions" / "arithmetic.jsonl").read_bytes()


def test_an_error_is_reported_in_one_line(refused, tmp_path):
    line = refused("eval", "embedded", "--suite", "aritmetic")
    assert line.startswith("unknown suite 'aritmetic' (allowed: gsm8k, math500, amc23, aime24, aime25, arithmetic)")
    assert line.endswith("; did you mean 'arithmetic'?")
    assert refused("eval", "embedded", "--suite", ",") == "--suite ',': expected comma-separated suites, such as gsm8k,math500"
    assert "no gsm8k.jsonl or gsm8k_test.jsonl in --data" in refused("eval", "embedded", "--suite", "gsm8k", "--data", tmp_path)
    assert refused("eval", "embeded", *QUICK).endswith("; did you mean 'embedded'?")
    assert refused("eval", "embedded", *QUICK, "--temperature", "0") == (
        "rollout.temperature=0.0: input should be greater than 0"
    )
    assert refused("eval", "embedded", *QUICK, "--set", "model.chat_template=true") == (
        "model.chat_template=true: the tokenizer of 'embedded' has no chat template; remove the setting"
    )
    assert refused("eval", "embedded", *QUICK, "--set", "learner.lr=1") == (
        "--set learner.lr: an evaluation has only the sections model and rollout"
    )
    assert refused("eval", "embedded", *QUICK, "--set", "rollout.temp=1") == (
        "unknown key 'rollout.temp'; did you mean 'rollout.temperature'?"
    )
    assert refused("eval", "embedded", *QUICK, "--set", "rollout.engine=vllm").startswith("rollout.engine='vllm': ")
    assert refused("eval", "embedded", *QUICK, "--seed", "-1") == "seed=-1: input should be greater than or equal to 0"


def test_questions_that_the_tokenizer_cannot_read_are_refused(refused, tmp_path):
    pytest.importorskip("math_verify")
    (tmp_path / "words.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    line = refused("eval", "embedded", "--suite", "words", "--data", tmp_path)
    assert line.startswith("suite 'words' cannot be used with model 'embedded': the prompt ")


def test_an_unrelated_output_directory_is_refused(refused, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("steps: 1\n")
    assert refused("eval", "embedded", *QUICK, "--output", tmp_path / "run") == (
        f"'{tmp_path / 'run'}' is not an evaluation directory; choose another, or remove it"
    )
    (tmp_path / "file").write_text("in the way")
    assert "cannot be written: Not a directory" in refused("eval", "embedded", *QUICK, "--output", tmp_path / "file" / "mine")


def test_a_model_that_is_given_twice_is_refused(refused):
    told = refused("eval", "embedded", *QUICK, "--set", "model.path=smollm2")
    assert told == "--set model.path: MODEL already sets it to 'embedded'; use only one of the two"
