"""Ways of sampling are compared with plain passes of the model before one of them is used."""

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from rlzoo.core.errors import RunError, UserError
from rlzoo.rollout.sampler import Draws, HFSampler
from tests.off_policy import VOCABULARY, plain_log_probs
from tests.rollout.test_decode import SIZES, llama
from tests.rollout.test_sampler import END, PROMPTS, tokenizer
from tests.rules import few

LONG = " ".join(f"w{index}" for index in range(5, 45))


def sampler(model, **settings):
    return HFSampler(model.eval(), tokenizer("<pad>"), end_ids=frozenset({END}), max_new_tokens=12, **settings)


def is_the_models(draws, rollouts):
    for rollout in rollouts:
        sequence = torch.tensor(rollout.prompt_ids + rollout.response_ids)
        expected = plain_log_probs(draws.model, sequence, len(rollout.response_ids)).detach()
        torch.testing.assert_close(torch.tensor(rollout.rollout_log_probs), expected, atol=1e-4, rtol=0)


def bart():  # its positions include the padding
    sizes = {"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 64, "max_position_embeddings": 256}
    return BartForCausalLM(BartConfig(vocab_size=VOCABULARY, d_model=32, init_std=0.2, **sizes))


def rwkv():  # its state includes the padding, and with a state it mixes rows
    model = RwkvForCausalLM(RwkvConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, intermediate_size=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)
    return model


def phi3():  # the longest row of a pass decides which rotary factors all of its rows get
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 16.0, 32.0]}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_key_value_heads": 2, "pad_token_id": 0, **SIZES}
    config = Phi3Config(rope_parameters=parameters | factors, original_max_position_embeddings=32, **sizes)
    return Phi3ForCausalLM(config)


@pytest.mark.parametrize(("make", "way"), [(bart, "equal"), (rwkv, "plain"), (phi3, "rows")])
@pytest.mark.parametrize("named", few([None, "generate"]))
def test_prompts_are_sampled_together_only_where_the_model_permits_it(make, way, named, caplog):
    torch.manual_seed(0)
    draws = sampler(make(), way=named)
    assert draws.way == ("generate" if named and way == "rows" else way)
    assert ("one pass over the row" in caplog.text) == (way != "rows")
    is_the_models(draws, draws.sample([*PROMPTS, LONG], 2, seed=3))


def test_a_model_that_no_sampling_path_reproduces_is_refused():
    class Mixing(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + output.logits.mean(dim=0, keepdim=True)
            return output

    torch.manual_seed(0)
    with pytest.raises(UserError, match=r"Mixing does not give the same log-probs when it samples .*generate: [\d.]+ nats"):
        sampler(Mixing(llama().config))


def test_keys_and_values_of_different_sizes_are_kept_between_turns():
    sizes = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(DeepseekV3Config(hidden_size=32, intermediate_size=64, **sizes, **experts, **SIZES))
    assert sampler(model).way == "rows"  # two turns are compared


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_end_the_run(value):
    model = llama()
    draws = sampler(model)
    with torch.no_grad():
        model.lm_head.weight[7] = value
    with pytest.raises(RunError, match="logits are not finite"):
        draws.sample(PROMPTS, 1, seed=0)


def test_rows_of_equal_length_keep_their_order_and_random_numbers():
    torch.manual_seed(0)
    draws, rows = sampler(bart()), [(5, 6, 7), (8,), (9, 10, 11), (12,)]
    together = draws.draw(rows, Draws(seed=0, rows=range(4), limit=6))
    alone = [draws.draw([ids], Draws(seed=0, rows=[place], limit=6))[0] for place, ids in enumerate(rows)]
    assert [drawn.tokens for drawn in together] == [drawn.tokens for drawn in alone]
