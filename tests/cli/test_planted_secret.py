"""Secrets given to a run do not appear in anything that it leaves behind: its directory, the store, and its output."""

import os
import shutil
from functools import partial

import mlflow
import pytest
import yaml

from rlzoo.cli import app as command_line
from rlzoo.cli.main import main
from rlzoo.config.composition import parse_overrides
from rlzoo.core.errors import PolicyError, UserError

IN_THE_ENVIRONMENT, IN_A_SETTING = "planted-env-0", "planted-key-1"
IN_AN_ADDRESS, OF_THE_STORE = "planted/pass-2", "planted-db-3"
PLANTED = (IN_THE_ENVIRONMENT, IN_A_SETTING, IN_AN_ADDRESS, OF_THE_STORE)
KEYED = """
import logging
from pydantic import Field
from rlzoo import ClipPolicy, hookimpl, ops

class Keyed(ClipPolicy):
    "Does not clip, and tells its log what it knows."
    name, paper, scope = "keyed", "none", "token"
    api_key: str = Field("none", description="of a judge")
    note: str = Field("none", description="any text")
    def __call__(self, inputs):
        logging.getLogger("rlzoo").warning("judge asked with api_key=%s %s", self.api_key, self.note)
        return ops.clipped_surrogate(ops.log_ratio(inputs), inputs.advantages, band=None)
"""
SERVER = f"rollout.vllm.server=http://me:{IN_AN_ADDRESS.replace('/', '%2F')}@127.0.0.1:9"
SECRETS = [f"clip.api_key={IN_A_SETTING}", SERVER, f"clip.note=told {IN_THE_ENVIRONMENT}"]
QUICK = [
    "rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_new_tokens=16", "eval.num_problems=0",
    "learner.num_minibatches=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def train(zygote):
    """Call `rlzoo train` in its own process, with the secret in its environment."""
    return partial(_train, zygote)


def _train(zygote, folder, *arguments, settings=(), store=None):
    environment = {
        **os.environ,
        "HF_TOKEN": IN_THE_ENVIRONMENT,
        "MLFLOW_TRACKING_URI": store or f"sqlite:///{folder}/mlflow.db",
    }
    options = [word for setting in settings for word in ("--set", setting)]
    words = ["train", "--output", folder / "run", *arguments, *options]
    return zygote.run(*words, folder=folder, environment=environment)


def leaks(folder, *texts):
    """Return where a planted secret is found, in any encoding."""
    places = [(str(file), file.read_bytes()) for file in folder.rglob("*") if file.is_file()]
    places += [(f"text {number}", text.encode()) for number, text in enumerate(texts)]
    spellings = [form for secret in PLANTED for form in {secret, secret.replace("/", "%2F")}]
    return [(name, secret) for name, content in places for secret in spellings if secret.encode() in content]


def test_the_secret_search_finds_planted_secrets(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"\0x" + IN_AN_ADDRESS.replace("/", "%2F").encode() + b"x")
    assert len(leaks(tmp_path)) == 1
    assert leaks(tmp_path / "none", f"a {IN_A_SETTING}") == [("text 0", IN_A_SETTING)]


@pytest.fixture(scope="module")
def plugin_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("plugins") / "keyed.py"
    file.write_text(KEYED + "\n@hookimpl\ndef rlzoo_clip_policies():\n    return [Keyed]\n")
    return file


@pytest.fixture(scope="module")
def finished(train, tmp_path_factory, empty_store, plugin_file):
    """A run of one step that was given every secret, and its output."""
    folder = tmp_path_factory.mktemp("planted")
    shutil.copy(empty_store, folder / "mlflow.db")
    done = train(folder, "--clip", "keyed", "--plugin", plugin_file, "--steps", "1", settings=[*QUICK, *SECRETS])
    assert done.returncode == 0, done.stderr
    return folder, done


def test_no_secret_is_written_sent_or_printed(finished):
    folder, done = finished
    assert leaks(folder, done.stdout, done.stderr) == []
    assert "judge asked with api_key=<redacted> told <redacted>" in done.stderr
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    assert config["clip"] == {**config["clip"], "api_key": "<redacted>", "note": "told <redacted>"}
    assert config["rollout"]["vllm"]["server"] == "http://<redacted>@127.0.0.1:9"
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("rlzoo").experiment_id])
    assert run.data.params["clip.api_key"] == "<redacted>"
    assert run.data.params["rollout.vllm.server"] == "http://<redacted>@127.0.0.1:9"
    assert run.data.params["rollout.max_new_tokens"] == "16"


@pytest.mark.long
def test_a_run_resumes_when_its_secrets_are_given_again(train, finished, plugin_file):
    folder, _ = finished
    done = train(folder, "--resume", "--steps", "2", settings=SECRETS[:1])
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == (
        "rlzoo: clip.note: holds a secret, which config.yaml does not store; supply it again with --set clip.note=VALUE or in "
        "a config"
    )
    done = train(folder, "--resume", "--steps", "2", settings=[*SECRETS[:2], "clip.note=another"])
    assert done.returncode == 2
    assert "clip.note changed from 'told <redacted>' to 'another'" in done.stderr
    again = plugin_file.with_name("secrets.yaml")
    again.write_text(yaml.safe_dump(parse_overrides(SECRETS)))
    done = train(folder, "--resume", "--steps", "2", "--config", again)
    assert done.returncode == 0, done.stderr
    assert leaks(folder, done.stdout, done.stderr) == []


@pytest.mark.long
def test_a_dry_run_prints_no_secret(train, tmp_path, plugin_file):
    for form in ((), ("--json",)):
        arguments = ("--clip", "keyed", "--plugin", plugin_file, "--dry-run", *form)
        done = train(tmp_path, *arguments, settings=SECRETS)
        assert done.returncode == 0, done.stderr
        assert leaks(tmp_path, done.stdout, done.stderr) == []


@pytest.mark.long
@pytest.mark.parametrize(
    "store",
    [f"http://me:{OF_THE_STORE}@127.0.0.1:9", f"postgresql://me:{OF_THE_STORE}@127.0.0.1:9/db?password={OF_THE_STORE}"],
)
def test_an_unreachable_store_is_reported_without_its_password(train, tmp_path, store):
    done = train(tmp_path, "--clip", "fspo", "--steps", "1", settings=QUICK, store=store)
    assert done.returncode == 0, done.stderr
    assert "MLflow did not receive everything" in done.stderr
    assert leaks(tmp_path, done.stdout, done.stderr) == []


TOLD = f"no answer from http://me:{OF_THE_STORE}@127.0.0.1:9 with api_key={IN_A_SETTING}"


@pytest.mark.parametrize(("error", "code"), [(UserError, 2), (lambda text: PolicyError("keyed", text), 1), (RuntimeError, 1)])
def test_an_error_is_printed_without_secrets(monkeypatch, capsys, tmp_path, error, code):
    def fails(*words, **options):
        try:
            raise KeyError(TOLD)
        except KeyError as cause:
            raise error(TOLD) from cause

    monkeypatch.setattr(command_line, "app", fails)
    with pytest.raises(SystemExit) as exit_:
        main()
    out, err = capsys.readouterr()
    assert exit_.value.code == code
    assert "no answer from http://<redacted>@127.0.0.1:9 with api_key=<redacted>" in err
    assert leaks(tmp_path, out, err) == []
    assert ("Traceback" in err) == (error is RuntimeError)
