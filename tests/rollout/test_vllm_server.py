"""A vLLM server that fails or loses the weights: the run waits for it, or stops in a resumable state.

A small server replaces vLLM's; tests/vllm has the real one.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import torch

import rlzoo
from rlzoo import RunConfig
from rlzoo.config.sections import VLLMConfig
from rlzoo.core.errors import RunError, UserError
from rlzoo.lab.evaluation import EvaluationConfig
from rlzoo.models.pretrained import load_pretrained
from rlzoo.rollout import vllm_server
from rlzoo.rollout.draws import Truncation
from rlzoo.rollout.kept import KeptSets
from rlzoo.rollout.vllm_model import vllm_weights
from rlzoo.rollout.vllm_server import ServerSampler
from tests.journal.tracking import hostile
from tests.off_policy import make_model
from tests.rollout.stand_in import StandIn, running
from tests.rollout.test_sampler import tokenizer
from tests.rules import few
from tests.training.short import lines, quick


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(vllm_server, "PAUSES", (0.01, 0.02, 0.03))
    with running() as server:
        yield server


def sampling_from(address, model_and_tokenizer=None, *, top_k=None, **settings):
    """Return a sampler from a server, without weights."""
    model, words = model_and_tokenizer or load_pretrained("embedded", "float32")
    common = {"end_ids": frozenset({1}), "max_new_tokens": 8, "served": "embedded", "batch_size": 4, "top_k": top_k}
    return ServerSampler(model, words, VLLMConfig(server=address, **settings), **common)


def with_weights(sampler):
    sampler.update_weights(sampler.model.state_dict().items())
    return sampler


@pytest.fixture
def sampler(server):
    with closing(with_weights(sampling_from(server.address))) as sampler:
        yield sampler
    assert not sampler.folder.exists()


@pytest.mark.parametrize("kind", ["sampler", "in_flight"])
@pytest.mark.parametrize("failures", [["close"], ["error", "error"]])
def test_a_batch_is_retried_on_a_server_that_failed(kind, failures, server, request, caplog):
    sampler = request.getfixturevalue(kind)
    server.failures = [None, None, *failures]
    rollouts = sampler.sample(["3+5="] * 6, 2, seed=1)
    assert [rollout.response_ids[0] for rollout in rollouts] == [5] * 12
    assert "retrying in" in caplog.text


def restart(server):
    """Restart the server between two requests, so that no request fails."""
    server.has_weights = False


LOST = r"the server no longer has the weights that this run sent: .* another run uses it; give every run its own server"


@pytest.mark.parametrize("kind", ["sampler", "in_flight"])
@pytest.mark.parametrize("change", [restart, StandIn.load_foreign])
def test_weights_that_changed_between_two_batches_end_the_run(kind, change, server, request):
    sampler = request.getfixturevalue(kind)
    change(server)
    with pytest.raises(RunError, match=LOST):
        sampler.sample(["3+5="] * 6, 2, seed=1)
    assert server.asked == 0, "nothing was drawn from other weights"


@pytest.mark.parametrize("kind", ["sampler", "in_flight"])
@pytest.mark.parametrize("failure", ["restart", "forget", "foreign"])
def test_weights_that_changed_during_a_batch_end_the_run(kind, failure, server, request):
    sampler = request.getfixturevalue(kind)
    server.failures = [*[None] * 5, failure]
    with pytest.raises(RunError, match=LOST):
        sampler.sample(["3+5="] * 6, 2, seed=1)


def test_the_smallest_update_of_another_run_is_detected(server, sampler):
    name = next(iter(server.loads[0]))
    server.loads.append({**server.loads[0], name: server.loads[0][name] + 1e-6})
    with pytest.raises(RunError, match=LOST):
        sampler.sample(["3+5="], 1, seed=1)


def test_foreign_weights_in_flight_are_detected_before_the_next_update(server, in_flight):
    weights = in_flight.model.state_dict().items()
    server.holds.set()
    with ThreadPoolExecutor(1) as pool:
        batch = pool.submit(in_flight.sample, ["3+5="] * 4, 1, seed=1)
        while server.asked < 4:
            time.sleep(0.01)
        server.load_foreign()
        server.holds.clear()
        with pytest.raises(RunError, match=LOST):
            in_flight.update_weights(weights, version=7)
        with pytest.raises(RunError, match=LOST):
            batch.result(20)


@pytest.mark.parametrize(
    ("noise", "is_change"), [([0.03, -0.02, 0.04], False), ([0.3, -0.2, 0.4], True), ([0.03, 0.03, 0.03], True)]
)
def test_rounding_is_accepted_but_a_consistent_difference_is_a_change(noise, is_change, server):
    # tolerance in bfloat16: 12 / 128 = 0.09375
    server.by_path["/server_info"][1]["vllm_config"]["model_config"]["dtype"] = "torch.bfloat16"
    with closing(with_weights(sampling_from(server.address))) as sampler:
        server.noise = list(noise)
        with pytest.raises(RunError, match=LOST) if is_change else nullcontext():
            sampler.sample(["3+5="], 1, seed=1)


def test_a_server_that_stays_down_ends_the_run_in_one_line(server, sampler):
    server.failures = ["error"] * 1000
    with pytest.raises(
        RunError,
        match=r"rollout.vllm.server='http://127.0.0.1:\d+': the server returned status 500 for /v1/completions: .*dead",
    ):
        sampler.sample(["3+5="], 1, seed=1)


def test_requests_that_the_server_refuses_are_not_retried(server, sampler):
    server.failures = ["refuse"] * 1000
    with pytest.raises(UserError, match=r"returned status 400 for .*too long"):
        sampler.sample(["3+5="], 1, seed=1)
    assert server.asked == 1


@pytest.fixture
def in_flight(server):
    with closing(with_weights(sampling_from(server.address, in_flight=True))) as sampler:
        yield sampler


def test_weights_updated_in_flight_apply_to_the_following_tokens(server, in_flight):
    server.aborted.clear()
    server.holds.set()
    weights = in_flight.model.state_dict().items()
    with ThreadPoolExecutor(3) as pool:
        batches = [pool.submit(in_flight.sample, ["3+5="] * 4, 2, seed=seed) for seed in (1, 2)]
        while server.asked < 8:  # two batches of four requests at a time
            time.sleep(0.01)
        before = len(server.loads)
        pool.submit(lambda: (server.aborted.wait(10), server.holds.clear()))
        in_flight.update_weights(weights, version=7)
        assert server.aborted.is_set(), "the weights changed while responses were drawn"
        rollouts = [rollout for batch in batches for rollout in batch.result(20)]
    assert len(server.loads) == before + 1
    versions = [rollout.versions for rollout in rollouts]
    assert versions.count((0, 7, 7)) == 8  # one token before, and two after
    assert versions.count((7, 7)) == 8  # requested after
    assert [rollout.policy_version for rollout in rollouts] == [row[0] for row in versions]
    assert all(len(rollout.rollout_log_probs) == len(rollout.response_ids) == rollout.length for rollout in rollouts)


def test_a_server_that_stays_down_in_flight_ends_the_run_in_one_line(server, in_flight):
    server.failures = ["error"] * 1000
    with ThreadPoolExecutor(2) as pool:
        batches = [pool.submit(in_flight.sample, ["3+5="], 1, seed=seed) for seed in (1, 2)]
        for batch in batches:
            with pytest.raises(RunError, match=r"returned status 500 for /v1/completions: .*dead"):
                batch.result(20)


@pytest.mark.parametrize("override", ["rollout.max_staleness=1", "rollout.vllm.server=null"])
def test_weights_change_in_flight_only_on_a_server_behind_a_queue(override):
    given = ["rollout.engine=vllm", "rollout.vllm.server=http://127.0.0.1:1", "rollout.max_staleness=2"]
    settings = ["rollout.engine=vllm", "rollout.vllm.in_flight=true"]
    assert EvaluationConfig.compose("embedded", settings, suites=("math500",)).rollout.vllm.in_flight
    with pytest.raises(
        UserError, match=r"in_flight=true: needs a rollout.vllm.server, and a rollout.max_staleness of at least 2"
    ):
        RunConfig.compose(clip="grpo", overrides=[*given, "rollout.vllm.in_flight=true", override])


@pytest.mark.parametrize("failures", few([["restart"], ["error"] * 100_000]), ids=["restarts", "stays away"])
def test_a_run_whose_server_stays_down_or_restarts_can_be_resumed(failures, server, tmp_path):
    def config(steps=3):
        overrides = [
            "rollout.engine=vllm", f"rollout.vllm.server={server.address}", "tracking.mlflow=false", "eval.num_problems=0",
            "checkpoint.every=0", "learner.num_minibatches=1",
        ]  # fmt: skip
        return quick(tmp_path / "run", steps=steps, overrides=overrides)

    def leave(step, metrics):
        if step == 2:
            server.failures = failures

    with pytest.raises(RunError, match=f"the engine is dead|{LOST}"):
        rlzoo.train(config(), leave)
    (saved,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert saved.name == "step-000002"
    assert (saved / "state" / "state.json").exists()
    server.failures = []
    result = rlzoo.train(config(), resume=True)
    assert [row["step"] for row in lines(result.path / "metrics.jsonl")] == [0, 1, 2, 3]
    questions = [{text["question"] for text in lines(result.path / "rollouts" / f"{step:06d}.jsonl")} for step in (1, 2, 3)]
    untouched = rlzoo.train(config().model_copy(update={"output": tmp_path / "other"}))
    expected = [{text["question"] for text in lines(untouched.path / "rollouts" / f"{step:06d}.jsonl")} for step in (1, 2, 3)]
    assert questions == expected, "no question was skipped or asked twice"


@pytest.mark.parametrize(
    "attack", [hostile.endless_body, hostile.claimed_size, hostile.dripping_body, hostile.not_json, hostile.other_json]
)
def test_a_server_that_is_not_vllm_is_reported_in_one_line(attack, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refused = pytest.raises(UserError, match=r"rollout.vllm.server='http://127.0.0.1:\d+': ")
    with hostile.serving(attack) as address, refused:
        sampling_from(address, timeout=1.0)


def test_an_unwritable_folder_is_reported_with_its_setting(server, tmp_path):
    (tmp_path / "file").touch()
    sampler = sampling_from(server.address, sync_folder=str(tmp_path / "file"))
    with closing(sampler), pytest.raises(UserError, match=r"rollout.vllm.sync_folder='.*file': Not a directory: .* free"):
        with_weights(sampler)


def test_a_server_on_another_machine_downloads_the_weights(server):
    sampler = sampling_from(server.address)
    sampler.is_fetching = True
    with closing(with_weights(sampler)):
        expected = dict(vllm_weights(sampler.model.state_dict().items(), sampler.model.config, sampler.head_size))
        assert server.loads[-1].keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in server.loads[-1].items())
        assert not list(sampler.folder.iterdir())
        with sampler._served(sampler.folder / "weights" / "model.safetensors") as address:
            for path in ("/", "/weights/", "/../stolen"):
                with pytest.raises(HTTPError, match="404"):
                    urlopen(address.replace("/weights/model.safetensors", path))
        server.by_path["/collective_rpc"] = (500, {"error": "no attribute 'fetch_weights'"})
        with pytest.raises(RunError, match=r"start it with --worker-extension-cls rlzoo.rollout.vllm_worker.FetchWeights"):
            with_weights(sampler)


def test_user_files_next_to_the_weights_are_kept(server, tmp_path):
    (tmp_path / "mine").write_text("mine")
    with_weights(sampling_from(server.address, sync_folder=str(tmp_path))).close()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_server_of_another_user_can_read_the_weights(server, sampler):
    umask = os.umask(0)
    os.umask(umask)
    assert server.modes == [0o777 & ~umask, 0o777 & ~umask, 0o666 & ~umask]


@pytest.fixture
def truncating(server):
    server.by_path["/server_info"][1]["vllm_config"]["model_config"]["max_logprobs"] = 40
    with closing(with_weights(sampling_from(server.address, (make_model(), tokenizer("<pad>")), top_k=2))) as sampler:
        yield sampler  # with a vocabulary of 97


def reported(finite):
    """Return 20 log-probs, some of which belong to kept tokens."""
    return {f"token_id:{(5 * place) % 97 + 1}": -1.0 if place < finite else -9999.0 for place in range(20)}


def test_the_kept_sets_are_the_tokens_that_the_server_gives_a_probability(server, truncating):
    server.top_log_probs = [reported(3), reported(1)]
    (rollout,) = truncating.sample(["w5"], 1, seed=1, truncation=Truncation(top_p=0.9, top_k=2))
    assert rollout.kept == KeptSets.of([1, 6, 11, 1], [3, 1])


def test_kept_sets_that_may_be_incomplete_are_refused(server, truncating):
    server.top_log_probs = [reported(3), reported(20)]
    with pytest.raises(RunError, match=r"rollout.top_k: so many tokens have the same logit that vLLM kept more than 19"):
        truncating.sample(["w5"], 1, seed=1, truncation=Truncation(top_k=2))


def test_a_server_that_returns_too_few_log_probs_is_refused(server):
    with pytest.raises(UserError, match=r"at most 20 log-probs .* needs 26; start it with --max-logprobs 26"):
        sampling_from(server.address, (make_model(), tokenizer("<pad>")), top_k=5)


@pytest.mark.parametrize("given", ["top_p=0.9", "top_k=513"])
def test_a_truncation_whose_kept_sets_vllm_does_not_return_is_refused(given):
    with pytest.raises(UserError, match=f"rollout.{given}: .* only if rollout.top_k is at most 512; set rollout.top_k, or"):
        rlzoo.RunConfig.compose(clip="grpo", overrides=["rollout.engine=vllm", f"rollout.{given}"])
