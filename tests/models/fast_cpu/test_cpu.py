"""oneDNN products compared with float64."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from rlzoo.models.fast_cpu.cpu import (
    OneDnnLinear,
    Product,
    has_onednn,
    prepare_cpu,
    use_onednn,
)

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")


def onednn_layer(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    use_onednn(layer)
    return layer


def relative_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("shape", "inputs", "outputs"), [((7, 33), 300, 500), ((64,), 256, 768), ((1, 5, 3), 1024, 64), ((1,), 64, 600)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_onednn_gives_the_value_and_the_gradients_of_float64(
    shape: tuple[int, ...], inputs: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(0)
    layer = onednn_layer(inputs, outputs, bias=bias)
    assert type(layer) is OneDnnLinear
    states, heard = torch.randn(*shape, inputs, requires_grad=True), torch.randn(*shape, outputs)
    value = layer(states)
    (value * heard).sum().backward()
    exact_states = states.detach().double().requires_grad_()
    exact = nn.Linear(inputs, outputs, bias=bias, dtype=torch.float64)
    exact.load_state_dict({name: tensor.double() for name, tensor in layer.state_dict().items()})
    exact_value = exact(exact_states)
    (exact_value * heard).sum().backward()
    pairs = [(value.detach(), exact_value.detach()), (states.grad, exact_states.grad)]
    pairs += [(mine.grad, theirs.grad) for mine, theirs in zip(layer.parameters(), exact.parameters(), strict=True)]
    assert len(pairs) == 3 + bias
    for mine, theirs in pairs:
        assert mine is not None
        assert theirs is not None
        assert mine.dtype == torch.float32
        assert relative_error(mine, theirs) < 1e-6


def test_only_tensors_that_require_a_gradient_get_one() -> None:
    layer = onednn_layer(256, 256)
    layer.weight.requires_grad_(False)
    states = torch.randn(4, 256, requires_grad=True)
    layer(states).sum().backward()
    assert layer.weight.grad is None
    assert states.grad is not None


def test_a_model_may_change_the_result_in_place() -> None:
    states = torch.randn(2, 3, 4, requires_grad=True)
    result = onednn_layer(4, 5)(states)
    result += 1
    result.sum().backward()
    assert states.grad is not None


def test_column_major_rows_give_the_same_result() -> None:
    layer = onednn_layer(256, 300)
    states = torch.randn(256, 9).t()
    assert torch.allclose(layer(states), layer(states.contiguous()), rtol=0, atol=1e-6)


def test_bfloat16_autocast_and_empty_inputs_fall_back_to_torch() -> None:
    layer = onednn_layer(256, 300)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(4, 256)).dtype == torch.bfloat16
    assert layer(torch.randn(0, 256)).shape == (0, 300)
    assert layer.bfloat16()(torch.randn(4, 256).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("inputs", [16, 256, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_float64_for_any_number_of_rows(dtype: torch.dtype, inputs: int, packs: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(200, inputs).to(dtype), torch.randn(200).to(dtype)
    for own in (bias, None):
        product = Product(weight, own, packs=packs)
        for rows in (5, 5, 4, 1):
            states = torch.randn(rows, inputs).to(dtype)
            exact = states.double() @ weight.double().t() + (0 if own is None else own.double())
            found = product(states)
            assert found.dtype == dtype
            assert relative_error(found, exact) < (1e-6 if dtype == torch.float32 else 1e-2)


def test_a_prepared_model_keeps_its_names_weights_gradients_and_loading(tmp_path: object) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model, plain = LlamaForCausalLM(config), LlamaForCausalLM(config)
    use_onednn(model)
    assert model.load_state_dict(plain.state_dict()).missing_keys == []
    kinds = {name.rsplit(".")[-1]: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert kinds["gate_proj"] is OneDnnLinear
    assert kinds["lm_head"] is OneDnnLinear
    assert kinds["k_proj"] is nn.Linear  # 64 x 128 elements are too few
    ids = torch.randint(0, 300, (3, 40))
    exact = LlamaForCausalLM(config).double()
    exact.load_state_dict({name: tensor.double() for name, tensor in plain.state_dict().items()})
    for one in (model, exact):
        one(input_ids=ids, labels=ids).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert relative_error(mine.grad, theirs.grad) < 1e-5, name
    model.save_pretrained(str(tmp_path))
    again = LlamaForCausalLM.from_pretrained(str(tmp_path))
    assert type(again.lm_head) is nn.Linear
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again.parameters(), plain.parameters(), strict=True))


def test_a_model_on_another_device_is_unchanged() -> None:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=256, num_hidden_layers=1))
    prepare_cpu(model)
    assert type(model.lm_head) is nn.Linear


def test_a_model_that_moves_to_a_gpu_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    model = LlamaForCausalLM(LlamaConfig(vocab_size=300, hidden_size=256, intermediate_size=256, num_hidden_layers=1))
    prepare_cpu(model)
    assert type(model.lm_head) is nn.Linear


GROWTH = """
import psutil, torch
from rlzoo.models.pretrained import load_pretrained

load_pretrained("embedded")
kept, process = [], psutil.Process()
for turn in range(40):
    tensor = torch.ones(2**24 + 2**18 * turn)
    kept.append([tensor[0].clone() for _ in range(100)])  # small blocks between large ones
    del tensor
    if turn == 4:
        before = process.memory_info().rss
print(process.memory_info().rss - before)
"""


@pytest.mark.long
def test_tensors_of_varying_sizes_leave_no_gaps_in_memory() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2**27
