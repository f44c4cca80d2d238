"""A model must be a pure function of its row: one test for each question of the probe, in plain passes and in the learner."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM, PhimoeConfig, PhimoeForCausalLM

from rlzoo import UserError, load_zoo
from rlzoo.config.sections import LearnerConfig
from rlzoo.learner.learner import Learner
from rlzoo.learner.micro_batches import cut
from rlzoo.models.pretrained import load_pretrained
from rlzoo.models.probe import Probe, plain_log_probs
from tests.models.tiny import SIZES, tiny_llama, tiny_qwen3
from tests.rules import few


def learner(model, **settings):
    config = LearnerConfig.model_validate(settings)
    return Learner(model, load_zoo()["grpo"](), config, pad_id=1, max_length=8, num_updates=2)


def llama(**settings):
    return tiny_llama(num_hidden_layers=2, initializer_range=0.3, max_position_embeddings=512, **settings)


def with_forward(change):
    """A model whose pass is changed by ``change(model, hidden states)`` after its layers."""

    class Changed(LlamaForCausalLM):
        pass

    model = llama()
    model.__class__ = Changed
    model.model.register_forward_hook(lambda module, _, output: setattr(output, "last_hidden_state", change(model, output[0])))
    return model


def noisy(_, states):
    return states + 0.1 * torch.randn_like(states)


def sees_one_token_ahead(_, states):
    return states + 0.1 * states.roll(-1, dims=1)


def grows_with_the_longest_row(model, states):
    model.longest = max(getattr(model, "longest", 0), states.shape[1])
    return states * (1 + 0.01 * model.longest)


def is_not_finite(_, states):
    return states / 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (noisy, "is not repeatable"),
        (sees_one_token_ahead, "is not causal"),
        (grows_with_the_longest_row, "depends on earlier passes"),
        (is_not_finite, "has logits that are not finite"),
    ],
)
def test_a_model_whose_output_is_not_a_causal_function_of_its_row_is_refused(change, problem, dtype):
    with pytest.raises(UserError, match=rf"model.path: Changed {problem}"):
        Probe.of(with_forward(change).to(dtype))


def test_rows_that_cross_a_rotary_switch_are_refused_and_others_are_not_computed_together(monkeypatch):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40}
    rope |= {"factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0]}
    model = llama(rope_parameters=rope)
    with pytest.raises(UserError, match=r"changes at 40 tokens: set rollout.max_new_tokens so that rows .now up to 60 tokens"):
        Probe.of(model, 60)
    assert len(Probe.of(model, 30).rows[-1]) == 30
    monkeypatch.setattr("rlzoo.models.probe.ROW_FLOP", {"cpu": 1.0})  # too expensive: the configuration decides
    with pytest.raises(UserError, match=r"is not causal in rows of more than 200 tokens; .* have at most 200"):
        Probe.of(llama(rope_parameters=rope | {"original_max_position_embeddings": 200}), 300)
    alike = learner(model).micro_batches._cut([12, 40, 60, 41, 8], torch.arange(5))
    assert sorted(sorted(rows.tolist()) for rows in alike) == [[0, 1, 4], [2, 3]]


@pytest.mark.parametrize(
    ("settings", "longest", "reached"),
    [({}, 300, 64), ({"sliding_window": 100}, 300, 120), ({"sliding_window": 100}, 90, 64), ({}, 20, 20)],
)
def test_rows_exceed_the_windows_of_a_model_that_is_expensive_but_never_the_run(monkeypatch, settings, longest, reached):
    monkeypatch.setattr("rlzoo.models.probe.ROW_FLOP", {"cpu": 2.0 * 40 * 10_000})
    model = llama(**settings, hidden_act="silu")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    rows = Probe.of(model, longest).rows
    assert len(rows[-1]) == reached
    assert len({len(row) for row in rows}) >= 3
    assert not {token for row in rows for token in row} & {0, 1, *range(258, 999)} - {1}


def together(model, change):
    """Change hidden states in passes of several rows only."""

    class Changed(LlamaForCausalLM):
        pass

    model.__class__ = Changed
    hook = lambda module, _, output: setattr(output, "last_hidden_state", change(output[0]))  # noqa: E731
    model.model.register_forward_hook(hook)
    return model


def test_a_model_that_mixes_rows_of_one_pass_is_refused():
    with pytest.raises(UserError, match=r"model.path: computing Changed's rows together in the learner moves log-probs by"):
        learner(together(llama(), lambda states: states - 0.5 * states.mean(dim=0, keepdim=True) * (len(states) > 1)))


def test_micro_batches_hold_one_length_if_padding_changes_log_probs(caplog):
    model = llama()
    # the model looks at the last position of its input, which is another row's length
    model.model.embed_tokens.register_forward_hook(lambda _, ids, states: states * (1 + (ids[0] == 1).any(-1)[:, None, None]))
    made = learner(model)
    assert "each micro-batch will have one length" in caplog.text
    assert [rows.tolist() for rows in made.micro_batches._cut([3, 5, 3], torch.arange(3))] == [[1], [0, 2]]
    assert len(cut([3, 5, 3], torch.arange(3), 100)) == 1


@pytest.mark.parametrize(("positions", "found"), [(None, "moves log-probs by"), (torch.zeros(1, 3), r"fails \(IndexError")])
def test_packed_rows_that_are_mixed_or_fail_are_refused(positions, found):
    model = llama()

    def replace(_, args, given):
        packed = given.get("position_ids") is not None and not given["position_ids"].diff().eq(1).all()
        return args, {**given, "position_ids": positions} if packed else given

    model.model.register_forward_pre_hook(replace, with_kwargs=True)
    with pytest.raises(UserError, match=rf"learner.packing: LlamaForCausalLM .* mixes packed rows, which {found}"):
        learner(model, packing=True)


def phimoe():
    torch.manual_seed(0)
    sizes = {**SIZES, "num_hidden_layers": 2, "initializer_range": 0.2}
    return PhimoeForCausalLM(PhimoeConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, eos_token_id=0)).eval()


def test_checkpointing_enables_no_dropout_and_recomputes_activations():
    made = learner(phimoe(), gradient_checkpointing=True)  # refused if the experts were sampled
    calls = []
    made.language_model.model.layers[0].input_layernorm.register_forward_hook(lambda *_: calls.append(1))
    loss = made.language_model(input_ids=torch.arange(2, 12)[None], use_cache=False).logits.logsumexp(-1).sum()
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2
    plain_log_probs(made.language_model, [3, 4, 5])
    assert made.language_model.model.layers[0].training


def test_checkpointing_that_needs_noisy_layers_is_refused():
    model = llama()
    model.model.layers[0].register_forward_hook(lambda layer, _, states: states + layer.training * torch.randn_like(states))
    with pytest.raises(UserError, match=r"learner.gradient_checkpointing=true: LlamaForCausalLM needs training mode"):
        learner(model, gradient_checkpointing=True)
    model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match=r"learner.gradient_checkpointing=true: .* does not support .*; set it to false"):
        learner(model, gradient_checkpointing=True)


@pytest.mark.parametrize("autocast", ["none", "bfloat16"])
@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("packing", few([True, False]))
def test_healthy_models_pass(packing, dtype, autocast):
    for model in (load_pretrained("embedded")[0], tiny_llama(), tiny_qwen3(), phimoe()):
        made = learner(copy.deepcopy(model).to(dtype), packing=packing, autocast=autocast)
        assert not made.micro_batches.keeps_lengths_apart
