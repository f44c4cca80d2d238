"""Which sampler a run has, what is rejected, and how weights are written for vLLM; all without vLLM."""

import sys

import pytest
import torch
from transformers import LlamaConfig

from rlzoo import RunConfig
from rlzoo.config.engines import engine_of
from rlzoo.core.errors import UserError
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from rlzoo.rollout.sampler import HFSampler
from rlzoo.rollout.vllm_model import cpu_head_size, vllm_weights
from rlzoo.rollout.vllm_sampler import request_seed
from tests.rollout.stand_in import running

MODEL, TOKENIZER = load_pretrained("embedded")


def sampler(*overrides, **options):
    config = RunConfig.compose(clip="grpo", overrides=overrides)
    end_ids = eos_token_ids(MODEL, TOKENIZER)
    return engine_of(config.rollout).make(MODEL, TOKENIZER, end_ids, named=config.model, **options)


def refusal(*overrides):
    with pytest.raises(UserError) as refused:
        sampler("rollout.engine=vllm", *overrides)
    return str(refused.value)


def test_transformers_samples_unless_another_engine_is_named():
    plain = sampler("rollout.max_new_tokens=7", "rollout.batch_size=3")
    assert isinstance(plain, HFSampler)
    assert (plain.max_new_tokens, plain.batch_size, plain.needs_weights) == (7, 3, False)
    assert plain.model is MODEL
    own = sampler(own_weights=True)
    assert own.needs_weights
    assert own.model is not MODEL


def test_an_end_token_that_cannot_be_drawn_is_left_out():
    config = RunConfig.compose(clip="grpo")
    size = MODEL.config.vocab_size
    found = engine_of(config.rollout).make(MODEL, TOKENIZER, frozenset({1, size - 1, size}), named=config.model)
    assert found.end_ids == {1, size - 1}


def test_without_vllm_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert refusal().startswith("rollout.engine='vllm': vLLM cannot be imported: ")
    assert refusal().endswith("; see docs/how-to/vllm.md, or set rollout.vllm.server")


@pytest.mark.parametrize("key", ["rollout.temperature", "eval.temperature"])
def test_temperatures_that_vllm_does_not_take_are_refused_at_the_start(key):
    assert refusal(f"{key}=2.5") == f"{key}=2.5: vLLM accepts 0.01 to 2; for other temperatures, set rollout.engine=hf"


def test_an_invalid_server_address_is_refused():
    with pytest.raises(UserError, match=r"rollout.vllm.server='127.0.0.1:8000'"):
        sampler("rollout.vllm.server=127.0.0.1:8000")


def test_every_response_has_a_distinct_seed():
    seeds = {request_seed(seed, row) for seed in range(20) for row in range(20)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_tied_embeddings_are_sent_twice_and_other_weights_once():
    names = [name for name, _ in vllm_weights(MODEL.named_parameters(), MODEL.config, 16)]  # these omit the tied head
    assert names[-1] == "lm_head.weight"
    assert names[:-1] == [name for name, _ in MODEL.named_parameters()]
    given = dict(vllm_weights(MODEL.state_dict().items(), MODEL.config, 16))
    assert given.keys() == MODEL.state_dict().keys()
    assert all(torch.equal(given[name], tensor) for name, tensor in MODEL.state_dict().items())


def test_heads_are_padded_with_zeros_and_scaled_to_the_same_scores():
    # q, k, v of 4, 2 and 2 heads of 16 in 64 dimensions
    given = dict(vllm_weights(MODEL.state_dict().items(), MODEL.config, 32))
    own, layer = MODEL.state_dict(), "model.layers.1.self_attn."
    for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
        padded = given[f"{layer}{name}.weight"].view(heads, 32, 64)
        assert torch.equal(padded[:, :16], own[f"{layer}{name}.weight"].view(heads, 16, 64))
        assert not padded[:, 16:].any()
    output = given[f"{layer}o_proj.weight"].view(64, 4, 32)
    assert torch.equal(output[..., :16], own[f"{layer}o_proj.weight"].view(64, 4, 16))
    assert not output[..., 16:].any()
    # (sqrt(2) q) . (sqrt(2) w k) / sqrt(32) = q . k / sqrt(16), so w = 1 / sqrt(2)
    torch.testing.assert_close(given[f"{layer}k_norm.weight"][:16], own[f"{layer}k_norm.weight"] / 2**0.5)
    assert torch.equal(given[f"{layer}q_norm.weight"][:16], own[f"{layer}q_norm.weight"])


def test_heads_that_cannot_be_padded_are_refused():
    assert cpu_head_size(MODEL.config) == 32
    assert cpu_head_size(LlamaConfig(hidden_size=64, num_attention_heads=1)) == 64
    with pytest.raises(UserError, match=r"vLLM supports head sizes 32, 64, .* on the CPU, not 16; use rollout.engine=hf"):
        cpu_head_size(LlamaConfig(hidden_size=64, num_attention_heads=4))


@pytest.fixture
def server():
    with running() as server:
        yield server


def test_a_compatible_server_is_accepted_and_its_folder_removed(server, tmp_path):
    fitting = sampler("rollout.engine=vllm", f"rollout.vllm.server={server.address}/")
    assert fitting.max_model_len == 256
    fitting.update_weights(MODEL.state_dict().items())
    fitting.update_weights(MODEL.state_dict().items())
    assert not list(fitting.folder.iterdir())
    fitting.close()
    assert not fitting.folder.exists()
    named = sampler("rollout.engine=vllm", f"rollout.vllm.server={server.address}", f"rollout.vllm.sync_folder={tmp_path}")
    named.update_weights(MODEL.state_dict().items())
    named.close()
    assert not list(tmp_path.iterdir())


def test_an_unreachable_server_is_refused():
    assert "the server failed to respond to /v1/models" in refusal("rollout.vllm.server=http://127.0.0.1:9")
    assert "start it as described in docs/how-to/vllm.md" in refusal("rollout.vllm.server=http://127.0.0.1:9")


def test_a_server_that_samples_something_else_is_refused(server):
    def refused(path, change, *overrides):
        given = server.by_path[path]
        server.by_path[path] = change
        line = refusal(f"rollout.vllm.server={server.address}", *overrides)
        server.by_path[path] = given
        assert line.startswith(f"rollout.vllm.server='{server.address}': the server ")
        assert "\n" not in line
        return line.partition("': the server ")[2]

    def config(**settings):
        inner = server.by_path["/server_info"][1]["vllm_config"]
        return 200, {"vllm_config": {**inner, "model_config": {**inner["model_config"], **settings}}}

    other = (200, {"data": [{"id": "other"}]})
    advice = "start it with that model, or with --served-model-name embedded"
    assert refused("/v1/models", other) == f"serves other, not model.path='embedded'; {advice}"
    missing = (404, {"detail": "Not Found"})
    assert refused("/server_info", missing).endswith("start it with VLLM_SERVER_DEV_MODE=1")
    raw = config(logprobs_mode="raw_logprobs")
    assert refused("/server_info", raw).endswith("raw_logprobs; start it with --logprobs-mode processed_logprobs")
    defaults = config(generation_config="auto")
    assert refused("/server_info", defaults).endswith("auto; start it with --generation-config vllm")
    pieces = config()
    pieces[1]["vllm_config"]["scheduler_config"] = {"enable_chunked_prefill": True}
    assert refused("/server_info", pieces).endswith("fails on the CPU; start it with --no-enable-chunked-prefill")
    assert refused("/server_info", config(), "rollout.vllm.dtype=bfloat16").endswith("start it with --dtype bfloat16")
    assert refused("/server_info", config(), "rollout.vllm.max_model_len=300").startswith("accepts 256 tokens, fewer than")


def test_a_server_with_too_short_a_context_is_refused(server):
    line = refusal(f"rollout.vllm.server={server.address}", "rollout.max_new_tokens=256")
    assert line.startswith(
        "rollout.max_new_tokens=256: with a prompt, this exceeds vLLM's limit of 256 tokens; lower it, or raise"
    )


def test_a_server_that_does_not_answer_is_an_error_after_the_time_out(server):
    server.by_path["/v1/models"] = None
    line = refusal(f"rollout.vllm.server={server.address}", "rollout.vllm.timeout=0.3")
    assert line.endswith("the server did not respond to /v1/models within 0.3 s (rollout.vllm.timeout)")


@pytest.mark.parametrize(
    ("path", "answer", "expected"),
    [
        ("/collective_rpc", (500, {"error": "Repo id must be"}), "it must have access to the folder"),
        ("/reset_prefix_cache", (200, {"success": False}), "did not reset its prefix cache"),
    ],
)
def test_weights_that_do_not_arrive_are_an_error_and_leave_nothing(server, tmp_path, path, answer, expected):
    folder = f"rollout.vllm.sync_folder={tmp_path}"
    given = sampler("rollout.engine=vllm", f"rollout.vllm.server={server.address}", folder)
    server.by_path[path] = answer
    with pytest.raises(UserError, match=expected):
        given.update_weights(MODEL.state_dict().items())
    assert not given.has_weights
    assert not list(tmp_path.iterdir())
