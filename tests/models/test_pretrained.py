"""Models are loaded by name, without dropout and without output; a mistake is reported in one line."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
)

from rlzoo.core.errors import UserError
from rlzoo.models import pretrained
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from tests.models.tiny import IDS, TOKENS, refuses, save, tiny_llama, tiny_qwen3, tiny_tokenizer


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3])
def test_a_saved_model_comes_back_exactly(make, tmp_path):
    original = make()
    model, tokenizer = load_pretrained(str(save(tmp_path, original)))
    assert type(model) is type(original)
    assert model.dtype == torch.float32
    assert torch.equal(model(IDS).logits, original.eval()(IDS).logits)
    assert model.config.use_cache == original.config.use_cache
    assert tokenizer.decode(tokenizer("1+1=2").input_ids) == "1+1=2"
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == original.config.tie_word_embeddings


def test_weights_have_the_dtype_asked_for(tmp_path):
    model, _ = load_pretrained(str(save(tmp_path)), "bfloat16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_requested_attention_is_used(tmp_path):
    folder = str(save(tmp_path))
    eager, _ = load_pretrained(folder, attn_implementation="eager")
    usual, _ = load_pretrained(folder)
    assert (eager.config._attn_implementation, usual.config._attn_implementation) == ("eager", "sdpa")
    torch.testing.assert_close(eager(IDS).logits, usual(IDS).logits)
    with pytest.raises(UserError, match=r"with model.attn_implementation='none-such'.*eager"):
        load_pretrained(folder, attn_implementation="none-such")


def test_training_mode_has_no_dropout(tmp_path):
    gpt2 = GPT2Config(
        vocab_size=len(TOKENS),
        bos_token_id=0,
        eos_token_id=0,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.5,
        embd_pdrop=0.5,
        attn_pdrop=0.5,
    )
    for name, original in {"llama": tiny_llama(attention_dropout=0.5), "gpt2": GPT2LMHeadModel(gpt2)}.items():
        original.train()
        assert not torch.equal(original(IDS).logits, original(IDS).logits)  # otherwise this test would show nothing
        model, _ = load_pretrained(str(save(tmp_path / name, original)))
        model.train()
        assert torch.equal(model(IDS).logits, model(IDS).logits)
        assert getattr(model.config, "attention_dropout", 0) == 0


def test_a_padding_token_always_exists_and_padding_is_on_the_left(tmp_path):
    _, tokenizer = load_pretrained(str(save(tmp_path / "without")))
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<end>")
    both = tiny_tokenizer(eos_token="<end>", pad_token="<pad>", padding_side="right")
    _, tokenizer = load_pretrained(str(save(tmp_path / "with", tokenizer=both)))
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<pad>")
    both.add_special_tokens({"pad_token": "<more>"})  # the embedding was not resized
    _, tokenizer = load_pretrained(str(save(tmp_path / "larger", tokenizer=both)))
    assert tokenizer.pad_token == "<end>"
    refuses(save(tmp_path / "neither", tokenizer=tiny_tokenizer(unk_token="!")), "neither an end nor a padding token")


def test_a_response_ends_at_any_end_token_of_the_model_or_tokenizer():
    class Silent:
        eos_token_id = None

    model = tiny_llama()
    tokenizer = tiny_tokenizer()
    for ids, expected in ((None, {0}), (3, {0, 3}), ([0, 3, 4], {0, 3, 4})):
        model.generation_config.eos_token_id = ids
        assert eos_token_ids(model, tokenizer) == frozenset(expected)
    model.generation_config.eos_token_id = 3
    assert eos_token_ids(model, Silent()) == {3}


@pytest.mark.long
def test_loading_is_quiet_and_leaves_no_trace(tmp_path):
    gpt2 = GPT2Config(vocab_size=len(TOKENS), bos_token_id=0, eos_token_id=0, n_embd=16, n_layer=1, n_head=2)
    save(tmp_path, GPT2LMHeadModel(gpt2))
    extra = load_file(tmp_path / "model.safetensors")
    save_file({**extra, "surplus.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    script = """
import sys, warnings
from transformers.utils import logging
from huggingface_hub.utils import are_progress_bars_disabled, logging as hub
from rlzoo.models.pretrained import load_pretrained
state = lambda: (logging.get_verbosity(), hub.get_verbosity(), logging.is_progress_bar_enabled(),
                 are_progress_bars_disabled(), list(warnings.filters))
before = state()
load_pretrained(sys.argv[1])
assert state() == before
logging.disable_progress_bar()
before = state()
load_pretrained(sys.argv[1])
assert state() == before
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_unknown_name_is_refused_without_asking_the_hub():
    message = refuses("smolm2", "model.path='smolm2': no such model", "'smollm2', a GGUF file, a folder, or a hub name")
    assert message.endswith("did you mean 'smollm2'?")
    refuses("", "model.path='': no such model")


def test_a_missing_folder_is_not_taken_for_a_hub_name(tmp_path):
    for path in ("./nowhere/model", "../nowhere", "a/b/c", "a/", str(tmp_path / "x")):
        assert refuses(path) == f"model.path={path!r}: no such folder"
    assert refuses("models/none.gguf") == "model.path='models/none.gguf': no such file"
    assert refuses("~/no-such-folder") == f"model.path={str(Path.home() / 'no-such-folder')!r}: no such folder"


def test_a_folder_must_hold_a_whole_model(tmp_path):
    refuses(tmp_path, f"{tmp_path} has no config.json, so it is not a model")
    file = tmp_path / "model.bin"
    file.touch()
    refuses(file, "is neither a folder nor a file whose name ends in .gguf")
    bad_config = save(tmp_path / "config")
    (bad_config / "config.json").write_text("{")
    refuses(bad_config, str(bad_config), "contains no model that can be loaded")
    odd_config = save(tmp_path / "odd")
    (odd_config / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    refuses(odd_config, "contains no model that can be loaded")
    no_weights = save(tmp_path / "weights")
    (no_weights / "model.safetensors").unlink()
    refuses(no_weights, "contains no model that can be loaded", "model.safetensors")
    cut = save(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    refuses(cut, "contains no model that can be loaded")
    no_tokenizer = save(tmp_path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (no_tokenizer / name).unlink()
    refuses(no_tokenizer, "contains no model that can be loaded", "tokenizer")


def test_missing_tensors_are_refused_rather_than_initialized(tmp_path):
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(tmp_path, "the weights lack 1 tensors, such as model.norm.weight")


def test_an_unreachable_hub_model_is_reported_in_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refuses(
        "no-such-org/no-such-model", "model.path='no-such-org/no-such-model': cannot be loaded", pretrained.ALLOWED, "OSError: "
    )


def test_the_embedded_model_is_part_of_the_package():
    model, tokenizer = load_pretrained("embedded")
    assert eos_token_ids(model, tokenizer)


def test_cudnn_attention_is_disabled_to_avoid_a_plan_per_length():
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_pretrained("embedded")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
