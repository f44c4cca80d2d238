"""Code that comes with a model runs only if it is explicitly allowed; weights in a pickle run no code."""

import json
import os

import pytest
import torch

import rlzoo
from rlzoo.config.composition import config_names, read_config
from rlzoo.config.sections import ModelConfig
from rlzoo.journal.manifest import sealed_files
from rlzoo.models.pretrained import load_named, load_pretrained
from tests.models.tiny import refuses, save
from tests.training.short import quick


def test_code_from_a_checkpoint_is_never_run(tmp_path):
    save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    refuses(tmp_path, "contains no model that can be loaded")


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
    """Make a complete model with its own code for one of its parts; returns its folder, and the file that the code creates."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))

    def make(part):
        folder, trap = save(tmp_path / part), tmp_path / "trap"
        (folder / f"own_{part.lower()}.py").write_text(OWN.format(trap=str(trap)))
        own = f"own_{part.lower()}"
        file, parts = "config.json", {"AutoConfig": f"{own}.Config", "AutoModelForCausalLM": f"{own}.Model"}
        if part == "AutoTokenizer":
            file, parts = "tokenizer_config.json", {part: [f"{own}.Tokenizer", None]}
        if part == "AutoModelForCausalLM":  # only the model
            del parts["AutoConfig"]
        settings = json.loads((folder / file).read_text()) | {"auto_map": parts}
        (folder / file).write_text(json.dumps(settings))
        return folder, trap

    return make


@pytest.mark.parametrize("part", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_custom_model_code_runs_only_if_it_is_allowed_by_name(with_code, caplog, part):
    folder, trap = with_code(part)
    load_pretrained(str(folder))  # with transformers' classes
    assert not trap.exists()
    assert caplog.text == ""
    load_named(ModelConfig(path=str(folder), trust_remote_code=True))
    assert trap.exists()
    assert f"the Python code in '{folder}' runs with all your permissions" in caplog.text


@pytest.mark.parametrize("part", ["AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"])
def test_custom_model_code_is_saved_with_checkpoints(with_code, tmp_path, part):
    folder, _ = with_code(part)
    settings = [f"model.path={folder}", "model.trust_remote_code=true", "checkpoint.keep=1", "checkpoint.every=1"]
    run = rlzoo.train(quick(tmp_path / "run", steps=2, overrides=[*settings, "tracking.mlflow=false", "eval.num_problems=0"]))
    (checkpoint,) = (run.path / "checkpoints").iterdir()
    code = f"own_{part.lower()}.py"
    assert (checkpoint / code).exists() == (code in sealed_files(checkpoint))
    assert (checkpoint / code).exists()


def test_trust_in_custom_model_code_is_off_by_default():
    assert ModelConfig().trust_remote_code is False
    for name in config_names():
        assert "trust_remote_code" not in str(read_config(name))


def test_weights_in_a_pickle_run_no_code(tmp_path):
    folder = save(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    planted = {"model.embed_tokens.weight": Planted(str(tmp_path / "trap"))}
    torch.save(planted, folder / "pytorch_model.bin")
    refuses(folder, "contains no model that can be loaded")
    assert not (tmp_path / "trap").exists()


class Planted:
    """Creates a folder when it is unpickled."""

    def __init__(self, trap):
        self.trap = trap

    def __reduce__(self):
        return os.mkdir, (self.trap,)
