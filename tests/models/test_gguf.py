"""A model in a GGUF file computes what the file says; a file that transformers would compute differently is refused."""

import numpy as np
import pytest
import torch

from rlzoo import RunConfig
from rlzoo.core.errors import UserError
from rlzoo.gate.architecture import find_architecture, weights_on_this_machine
from rlzoo.gate.enter import forecast
from rlzoo.gate.fingerprint import run_facts
from rlzoo.lab.evaluation import EvaluationConfig
from rlzoo.models.pretrained import load_pretrained
from tests.models.gguf_files import KINDS, TOKENS, byte_tokenizer, random_model, write_gguf
from tests.models.tiny import refuses
from tests.rules import few

NUMBERS = np.ones(4, np.float32)


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("RLZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("quantisation", [None, "Q8_0", "Q5_0", "Q5_1"])
def test_logits_are_those_of_the_weights_in_the_file(tmp_path, architecture, quantisation):
    file = tmp_path / "tiny.gguf"
    expected = write_gguf(
        file, random_model(architecture), quantisation=quantisation, pre="lfm2" if architecture == "lfm2" else "qwen2"
    )
    model, _ = load_pretrained(str(file))
    ids = torch.randint(2, len(TOKENS), (3, 60), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = expected(ids).logits
        torch.testing.assert_close(model(ids).logits.double(), logits, atol=1e-4, rtol=0)
    assert logits.std() > 1


@pytest.mark.parametrize("architecture", few(sorted(KINDS.keys() - {"llama", "qwen2"}), 0))
def test_logits_of_other_architectures_are_those_of_the_weights_in_the_file(tmp_path, architecture):
    test_logits_are_those_of_the_weights_in_the_file(tmp_path, architecture, quantisation=None)


def ids_of(*tokens):
    return [TOKENS.index(token) for token in tokens]


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("gpt-2", "a  1234", ["a", "Ġ", "Ġ", "123", "4"]),
        ("smollm", "a  1234", ["a", "ĠĠ", "1", "2", "3", "4"]),
        ("qwen2", "a  1234", ["a", "Ġ", "Ġ", "1", "2", "3", "4"]),
        ("qwen2", "e\u0301", ["Ã", "©"]),
        ("gpt-4o", "a 1234", ["a", "Ġ", "123", "4"]),
        ("gpt-4o", "hello", ["h", "e", "l", "l", "o"]),
        ("llama-bpe", "hello 1234", ["<pad>", "hello", "Ġ", "123", "4"]),
        ("tekken", "hello 12", ["<pad>", "hello", "Ġ", "1", "2"]),
    ],
)
def test_tokens_are_those_of_the_named_tokenizer(tmp_path, pre, text, tokens):
    architecture = "qwen2" if pre == "qwen2" else "llama"  # for which transformers makes a tokenizer of another class
    write_gguf(tmp_path / "tiny.gguf", random_model(architecture), pre=pre)
    _, tokenizer = load_pretrained(str(tmp_path / "tiny.gguf"))
    assert tokenizer(text)["input_ids"] == ids_of(*tokens)
    assert (tokenizer.eos_token, tokenizer.pad_token, len(tokenizer)) == ("<end>", "<pad>", len(TOKENS))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1"
    assert tokenizer("1<end>", add_special_tokens=False)["input_ids"] == ids_of("1", "<end>")


def pieces(writer, pre):
    """A tokenizer of SentencePiece, as that of Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁ab"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(index) for index in range(len(tokens))])
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def test_a_sentencepiece_tokenizer_puts_a_space_before_texts_also_after_control_tokens(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", random_model(vocab_size=264), tokenizer=pieces)
    _, tokenizer = load_pretrained(str(tmp_path / "tiny.gguf"))
    assert tokenizer.tokenize("ab</s>\nb") == ["▁ab", "</s>", "▁", "<0x0A>", "b"]
    assert tokenizer("a").input_ids == [1, 262]
    assert tokenizer.decode(tokenizer("ab b", add_special_tokens=False).input_ids) == "ab b"


def foreign(writer, pre):
    """A tokenizer with a control token that is no text of bytes, as those of DeepSeek."""
    byte_tokenizer(writer, pre, ["<｜end｜>", *TOKENS[1:]])


REFUSED = {
    "an ignored tensor": ({"tensors": [("rope_freqs.weight", NUMBERS)]}, "would ignore the tensor rope_freqs.weight"),
    "an ignored bias": ({"tensors": [("blk.1.attn_q.bias", NUMBERS)]}, "would ignore the tensor blk.1.attn_q.bias"),
    "a missing tensor": ({"without": ["blk.0.ffn_up.weight"]}, "the tensor model.layers.0.mlp.up_proj.weight"),
    "scaled positions": ({"keys": [("llama.rope.scaling.type", "yarn")]}, "llama.rope.scaling.type is 'yarn'"),
    "a window": ({"keys": [("llama.attention.sliding_window", 8)]}, "llama.attention.sliding_window is 8"),
    "experts": ({"keys": [("llama.expert_count", 4)]}, "llama.expert_count is 4"),
    "values of another size": ({"keys": [("llama.attention.value_length", 4)]}, "llama.attention.value_length is 4"),
    "a scale": ({"keys": [("llama.logit_scale", 0.5)]}, "llama.logit_scale is 0.5, but transformers would use None"),
    "an unknown split": ({"pre": "deepseek-coder"}, "cannot be converted (llama, gpt2, tokenizer.ggml.pre='deepseek-coder')"),
    "no prefix": (
        {"tokenizer": pieces, "keys": [("tokenizer.ggml.add_space_prefix", False)]},
        "cannot be converted (llama, llama, tokenizer.ggml.pre='default')",
    ),
    "a control token": ({"tokenizer": foreign}, "does not know the token '<｜end｜>'"),
    "another class": ({"model": random_model("qwen2"), "pre": "gpt-2"}, "Qwen2Tokenizer would replace its tokenizer"),
    "an unknown architecture": (
        {"keys": [("general.architecture", "mpt")]},
        "GGUF model with architecture mpt is not supported",
    ),
    "several files": ({"keys": [("split.count", 3)]}, "one of 3 files; merge them with llama-gguf-split --merge"),
}


@pytest.mark.parametrize(("changes", "line"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_transformers_would_compute_differently_is_refused_by_name(tmp_path, cache, changes, line):
    file = tmp_path / "tiny.gguf"
    write_gguf(file, **changes)
    message = refuses(file, f"model.path={str(file)!r}: ", line)
    assert [path.name for path in cache.iterdir()] == [".lock"]
    if not set(changes) & {"without", "model"} and changes.get("tokenizer") is not foreign:  # asked when weights are read
        with pytest.raises(UserError) as planned:
            find_architecture(str(file))
        assert line in str(planned.value)
    assert message.count(str(file)) == 1


def test_settings_that_agree_are_accepted(tmp_path):
    keys = {"attention.key_length": 8, "attention.value_length": 8, "rope.dimension_count": 8, "vocab_size": len(TOKENS)}
    keys |= {"rope.scaling.type": "none", "attention.causal": True, "expert_count": 0}
    write_gguf(tmp_path / "tiny.gguf", keys=[(f"llama.{key}", value) for key, value in keys.items()])
    load_pretrained(str(tmp_path / "tiny.gguf"))


def test_damaged_files_are_refused_in_one_line(tmp_path):
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    refuses(file, f"the file has only {len(content) - 100} of ", "copy it again")
    for damaged in (b"", b"GGUF", content[:1000], b"text" * 1000):
        file.write_bytes(damaged)
        refuses(file, "cannot be loaded")
        with pytest.raises(UserError, match="GGUF file does not describe a model"):
            find_architecture(str(file))


def test_a_plan_knows_the_size_of_a_model_that_has_not_been_converted(tmp_path, cache):
    file = tmp_path / "tiny.gguf"
    model = write_gguf(file, quantisation="Q8_0")
    overrides = [f"model.path={file}", "rollout.max_new_tokens=32", "tracking.mlflow=false"]
    config = RunConfig.compose(clip="grpo", overrides=overrides)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    plan = forecast(config)
    assert (plan.architecture.num_parameters, plan.architecture.max_length) == (numbers, 64)
    assert weights_on_this_machine(str(file)) == 4 * numbers
    assert not cache.exists()
    load_pretrained(str(file))
    assert find_architecture(str(file)).num_parameters == numbers
    assert weights_on_this_machine(str(file)) == pytest.approx(4 * numbers, rel=0.1)


def test_another_content_is_another_model(tmp_path, cache):
    file = tmp_path / "tiny.gguf"
    config = RunConfig.compose(clip="grpo", overrides=[f"model.path={file}", "tracking.mlflow=false"])
    settings, weights = [], []
    for pre in ("gpt-2", "smollm"):
        write_gguf(file, pre=pre)
        weights.append(load_pretrained(str(file))[1].tokenize("12"))
        facts = run_facts(config)
        settings.append((facts[f"file {file}"], EvaluationConfig.compose(str(file), [], suites=("arithmetic",)).settings()))
    assert weights == [["12"], ["1", "2"]]
    assert settings[0][0] != settings[1][0]
    assert settings[0][1] != settings[1][1]
    assert len([path for path in cache.iterdir() if path.name != ".lock"]) == 2
