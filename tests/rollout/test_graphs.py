"""Steps of constant shapes: the same tokens as other ways of sampling, and nothing that a CUDA graph cannot replay."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rlzoo import RunConfig
from rlzoo.config.engines import engine_of
from rlzoo.core.errors import UserError
from rlzoo.gate.settings import Start, check_settings
from rlzoo.rollout import graphs
from rlzoo.rollout.decode import decode, possible_ways
from rlzoo.rollout.draws import Truncation, row_uniforms
from rlzoo.rollout.open_responses import OpenResponses, RowLayer
from rlzoo.rollout.sampler import Draws, HFSampler
from tests.off_policy import make_model
from tests.rollout.test_decode import MODELS, SIZES, gpt2, llama
from tests.rollout.test_sampler import END, tokenizer
from tests.rules import few

READS = ("aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
"""Operators that wait for the device."""


def mistral():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2}
    return MistralForCausalLM(MistralConfig(sliding_window=None, **sizes, **SIZES))


FUSED = {**{name: make for name, make in MODELS.items() if name != "gpt2"}, "mistral": mistral}


def prompts(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(2, 97, (length,), generator=generator).tolist()) for length in lengths]


def sampled(model, rows, limit, *, way, ends=(END, 7, 8)):
    sampler = HFSampler(model, tokenizer("<pad>"), end_ids=frozenset(ends), max_new_tokens=limit, way=way)
    drawn = sampler.draw(rows, Draws(seed=4, rows=range(len(rows)), limit=limit, temperature=1.5))
    return [sampler.ended(each)[0] for each in drawn], drawn


def agree(ours, theirs):
    assert ours[0] == theirs[0]
    for tokens, one, other in zip(ours[0], ours[1], theirs[1], strict=True):
        first, second = (torch.tensor(each.log_probs[: len(tokens)]) for each in (one, other))
        torch.testing.assert_close(first, second, atol=1e-5, rtol=0)


def steps(model, rows, limit, *, ends=(END,), device="cpu", truncation=None):
    """Return steps after the first pass, for which the caller must enable inference mode."""
    responses = OpenResponses(model, rows, 0, limit, fuses=True, graphs=True)
    logits = responses.first_logits()
    numbers = row_uniforms(0, range(len(rows)), limit).t().contiguous().to(device)
    return graphs.StaticSteps(responses, logits, numbers, torch.tensor(ends, device=device), 0, 1.0, truncation)


@pytest.mark.parametrize(
    ("name", "lengths"), few([*((name, [2, 2, 5, 1] * 4) for name in FUSED), *((name, [3] * 16) for name in FUSED)], 2)
)
def test_the_tokens_are_those_of_fused_steps_and_of_generate(name, lengths):
    torch.manual_seed(0)
    model, rows = FUSED[name]().eval(), prompts(*lengths)
    ours = sampled(model, rows, 90, way="graph")
    ended = sorted(map(len, ours[0]))
    assert ended[0] < 20, "some responses end early"
    assert len({length // graphs.CHECKED for length in ended}) > 1, "some end after the first ones were removed"
    for way in ("fused", "generate"):
        agree(ours, sampled(model, rows, 90, way=way))


@pytest.mark.parametrize("attention", few(["sdpa", "eager"]))
def test_responses_may_need_more_columns_than_attention_reads_at_first(attention):
    torch.manual_seed(0)
    model, rows = llama().eval(), prompts(230, 250, 7)
    model.set_attn_implementation(attention)
    agree(sampled(model, rows, 40, ends=(), way="graph"), sampled(model, rows, 40, ends=(), way="generate"))


@pytest.mark.parametrize("lengths", [[250, 3, 240] * 6, [250] * 18], ids=["padded", "even"])
def test_each_shape_is_captured_once(lengths, monkeypatch):
    shapes, advance = [], graphs.StaticSteps._advance

    def recording(self):
        advance(self)
        shapes.append(self.shape)

    monkeypatch.setattr(graphs.StaticSteps, "_advance", recording)
    rows, uniforms = prompts(*lengths), row_uniforms(0, range(18), 300)
    torch.manual_seed(0)
    decode(llama().eval(), rows, uniforms, end_ids=frozenset({END}), pad_id=0, temperature=1.0, fuses=True, graphs=True)
    distinct = list(dict.fromkeys(shapes))
    assert [shape for shape, before in zip(shapes, [None, *shapes], strict=False) if shape != before] == distinct
    assert {number for number, _ in distinct} <= {18, 9, 4, 2, 1}
    assert len({number for number, _ in distinct}) > 2, "rows are removed"
    assert {columns for _, columns in distinct} == {256, 512, 768}


@pytest.mark.parametrize("truncation", [None, Truncation(top_p=0.9, top_k=20)], ids=str)
def test_a_step_reads_nothing_on_the_host(truncation):
    with torch.inference_mode():
        made = steps(make_model(vocabulary=600).eval(), prompts(2, 2, 5), 8, truncation=truncation)
        made._advance()
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            made._step()
    names = {event.key for event in recorded.key_averages()}
    assert "aten::scaled_dot_product_attention" in names
    assert names.isdisjoint(READS)


@pytest.mark.parametrize("truncation", [None, Truncation(top_p=0.9, top_k=20)], ids=str)
@pytest.mark.parametrize("vocabulary", [97, 600])
def test_a_step_needs_no_values_on_a_device_that_is_not_a_cpu(vocabulary, truncation, monkeypatch):
    # tensors on "meta" have no values and mix with no others, and the step takes the path of a GPU; autocast knows no "meta"
    enabled, autocast = torch.is_autocast_enabled, torch.autocast
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: enabled("cpu"))
    monkeypatch.setattr(torch, "autocast", lambda device, **settings: autocast("cpu", **settings))
    monkeypatch.setattr(OpenResponses, "_mask", lambda *_, **__: None)
    model = make_model(vocabulary=vocabulary).eval().to("meta")
    with torch.inference_mode():
        monkeypatch.setattr(graphs.StaticSteps, "_collect", lambda self: None)  # outside the graph
        made = steps(model, prompts(2, 2, 2), 8, device="meta", truncation=truncation)
        made.responses.mask = torch.ones(3, 1, 1, 256, dtype=torch.bool, device="meta")
        made.shape = (3, 256)
        for layer in made.layers:
            layer.width = 256
        made._step()
    assert made.drawn.device.type == "meta"


def test_the_host_asks_which_responses_have_ended_once_in_32_tokens():
    with torch.inference_mode():
        made = steps(make_model().eval(), prompts(2, 2, 5), 34, ends=())
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            made.run()
    counts = {event.key: event.count for event in recorded.key_averages()}
    assert counts["aten::_local_scalar_dense"] == 2  # after 1 and 33 tokens
    assert counts.get("aten::nonzero", 0) == 0


def test_padding_follows_the_end_of_a_response():
    torch.manual_seed(0)
    rows, uniforms = prompts(2, 2, 5, 1), row_uniforms(4, range(4), 40)
    decoded = decode(
        llama().eval(), rows, uniforms, end_ids=frozenset(range(20)), pad_id=77, temperature=1.0, fuses=True, graphs=True
    )
    ends = (decoded.tokens < 20).int()
    after = ends.cumsum(dim=1) - ends > 0
    assert after.any(dim=1).all()
    assert decoded.tokens[after].unique().tolist() == [77]
    assert not decoded.log_probs[after].any()
    assert (decoded.log_probs[~after] < 0).all()


def test_an_update_writes_the_column_of_the_tensor_and_what_was_not_written_is_0():
    layer = RowLayer(torch.tensor([2]), room=4)
    states = torch.arange(4.0).view(1, 1, 2, 2)
    layer.update(states, -states)
    layer.keys[:, :, 2:], layer.values[:, :, 2:] = torch.nan, torch.nan
    column = torch.tensor([3])
    layer.write_at(column)
    layer.width = 4
    new = torch.tensor([[8.0, 9.0], [6.0, 7.0]]).view(2, 1, 1, 2)
    keys, values = layer.update(new, -new)
    assert keys[:, 0].tolist() == [[[0, 1], [2, 3], [0, 0], [8, 9]], [[0, 1], [2, 3], [0, 0], [6, 7]]]
    column.fill_(2)
    keys, values = layer.update(-new, new)
    assert keys[1, 0].tolist() == [[0, 1], [2, 3], [-6, -7], [6, 7]]
    assert torch.equal(values, -keys)


def test_new_weights_are_used():
    torch.manual_seed(0)
    model, rows = make_model().eval(), prompts(2, 5)
    before = sampled(model, rows, 40, way="graph")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    after = sampled(model, rows, 40, way="graph")
    assert before[0] != after[0]
    agree(after, sampled(model, rows, 40, way="generate"))


def test_graphs_are_for_gpus_unless_they_are_required(monkeypatch):
    model = make_model()
    assert possible_ways(model) == possible_ways(model, "off") == ("fused", "rows", "generate", "equal", "plain")
    assert possible_ways(model, "on") == ("graph",)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert possible_ways(model) == ("graph", "fused", "rows", "generate", "equal", "plain")
    assert possible_ways(model, "off") == ("fused", "rows", "generate", "equal", "plain")


def test_graphs_that_are_required_are_refused_for_other_models():
    with pytest.raises(UserError, match=r"rollout.graphs=on: GPT2LMHeadModel has no fused steps; set rollout.graphs=auto"):
        HFSampler(gpt2(), tokenizer("<pad>"), end_ids=frozenset({END}), max_new_tokens=8, graphs="on")


def test_graphs_with_other_log_probs_than_the_model_are_refused():
    class Scaled(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 1.1
            return output

    Scaled.__name__ = "LlamaForCausalLM"
    torch.manual_seed(0)
    model = Scaled(llama().config).eval()
    with pytest.raises(UserError, match=r"constant shapes, .*: [\d.]+ nats; use rollout.graphs=auto, or another model"):
        HFSampler(model, tokenizer("<pad>"), end_ids=frozenset({END}), max_new_tokens=8, graphs="on")


@pytest.mark.parametrize(("value", "way"), [("auto", "fused"), ("on", "graph"), ("off", "fused")])
def test_the_setting_reaches_the_sampler(value, way):
    config = RunConfig.compose(clip="grpo", overrides=[f"rollout.graphs={value}"])
    sampler = engine_of(config.rollout).make(make_model(), tokenizer("<pad>"), frozenset({END}), named=config.model)
    assert sampler.way == way


@pytest.mark.parametrize("engine", ["generate", "vllm"])
def test_graphs_are_refused_with_another_engine(engine):
    overrides = [f"rollout.engine={engine}", "rollout.graphs=on"]
    with pytest.raises(UserError, match=r"rollout.graphs=on: only rollout.engine=hf has this setting; set it to auto"):
        RunConfig.compose(clip="grpo", overrides=overrides)


def test_graphs_are_refused_for_a_model_with_an_adapter():
    overrides = ["rollout.graphs=on", "learner.lora.rank=4"]
    with pytest.raises(UserError, match=r"rollout.graphs=on: a model with an adapter \(learner.lora.rank\) has no fused steps"):
        check_settings(RunConfig.compose(clip="grpo", overrides=overrides), Start(1))
    check_settings(RunConfig.compose(clip="grpo", overrides=[*overrides, "rollout.max_staleness=1"]), Start(1))
