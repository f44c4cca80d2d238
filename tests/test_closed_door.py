"""No file of the project executes what it reads: calls that would are rejected everywhere, except for those listed here."""

import ast
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlzoo import RunConfig, UserError
from rlzoo.tasks.suites import find_suite

ROOT = Path(__file__).resolve().parents[1]
CHECKED = ("rlzoo", "plugins", "examples", "docs", "noxfile.py")

EXCEPTIONS = {
    ("rlzoo/learner/optimization.py", "import of pickle"): "the name of the error that torch raises when it refuses a file",
    ("rlzoo/support/worker_main.py", "import of pickle"): "a worker reads the calls of the process that started it",
    ("rlzoo/support/workers.py", "import of pickle"): "writes calls for a worker, whose answers are JSON",
    ("rlzoo/measure/report.py", "import of jinja2.Environment"): "the template is the package's own, and values are escaped",
}
"""Allowed cases, by file and offence: each occurs once in that file, for the given reason."""

MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "tarfile", "zipfile", "pty", "commands"}
NAMES = {"eval", "exec", "compile", "__import__", "execfile"}
CALLS = {
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "shutil.unpack_archive",
    "yaml.unsafe_load", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load_all", "runpy.run_path", "runpy.run_module",
    "code.interact", "torch.hub.load", "torch.package.PackageImporter", "sympy.sympify", "jinja2.Template",
    "jinja2.Environment", "pandas.read_pickle", "hydra.utils.instantiate",
}  # fmt: skip
SAFE_LOADERS = {"SafeLoader", "CSafeLoader", "BaseLoader", "CBaseLoader"}


def offences(source):
    """Yield everything in a file that could execute something it reads."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"import of {name}" for name in names if name.partition(".")[0] in MODULES)
            if isinstance(node, ast.ImportFrom):  # from os import system
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                yield from (f"import of {name}" for name in full if name in CALLS | {"torch.load", "yaml.load", "numpy.load"})
        elif isinstance(node, ast.Call):
            yield from _of_call(node)
        elif isinstance(node, ast.Attribute) and _dotted(node) in ("builtins.eval", "builtins.exec"):
            yield f"use of {_dotted(node)}"
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from _switches({key.value: value for key, value in pairs if isinstance(key, ast.Constant)})


def _of_call(call):
    name, keywords = _dotted(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
    name = {"np.load": "numpy.load", "pd.read_pickle": "pandas.read_pickle"}.get(name, name)
    if (isinstance(call.func, ast.Name) and name in NAMES) or name in CALLS:
        yield f"call of {name}"
    if name == "torch.load" and not _is(keywords.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if name in ("yaml.load", "yaml.load_all"):
        loaders = [*call.args[1:2], *([keywords["Loader"]] if "Loader" in keywords else [])]
        if not loaders or _dotted(loaders[0]).rpartition(".")[2] not in SAFE_LOADERS:
            yield f"{name} without SafeLoader"
    if name.endswith((".extractall", ".extract_all")):
        yield "unpacking of an archive"
    yield from _switches(keywords)


def _switches(settings):
    """Yield unsafe settings, as keywords or in a dict."""
    trust = settings.get("trust_remote_code")
    if isinstance(trust, ast.Constant) and trust.value is not False:
        yield "trust_remote_code=True"
    for name in ("shell", "allow_pickle"):
        if name in settings and not _is(settings[name], False):
            yield f"{name}=True"


def _is(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def _dotted(node):
    if isinstance(node, ast.Name):
        return node.id
    return f"{_dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else ""


def files():
    for name in CHECKED:
        yield from [ROOT / name] if name.endswith(".py") else sorted((ROOT / name).rglob("*.py"))


def test_nothing_runs_what_it_reads():
    found: Counter[tuple[str, str]] = Counter()
    for file in files():
        found.update((str(file.relative_to(ROOT)), what) for what in offences(file.read_text(encoding="utf-8")))
    assert found == Counter(dict.fromkeys(EXCEPTIONS, 1))


REFUSED = {
    "eval(text)": "call of eval",
    "exec(text)": "call of exec",
    "f = builtins.eval": "use of builtins.eval",
    "__import__(name)": "call of __import__",
    "import pickle": "import of pickle",
    "import os, marshal": "import of marshal",
    "from shelve import open": "import of shelve",
    "import tarfile": "import of tarfile",
    "from zipfile import ZipFile": "import of zipfile",
    "archive.extractall(folder)": "unpacking of an archive",
    "shutil.unpack_archive(file)": "call of shutil.unpack_archive",
    "torch.load(file)": "torch.load without weights_only=True",
    "torch.load(file, weights_only=False)": "torch.load without weights_only=True",
    "from torch import load": "import of torch.load",
    "yaml.load(text)": "yaml.load without SafeLoader",
    "yaml.load(text, Loader=yaml.Loader)": "yaml.load without SafeLoader",
    "yaml.unsafe_load(text)": "call of yaml.unsafe_load",
    "AutoModel.from_pretrained(name, trust_remote_code=True)": "trust_remote_code=True",
    "settings = {'trust_remote_code': True}": "trust_remote_code=True",
    "subprocess.run(line, shell=True)": "shell=True",
    "subprocess.run(line, shell=asked)": "shell=True",
    "os.system(line)": "call of os.system",
    "from os import system": "import of os.system",
    "np.load(file, allow_pickle=True)": "allow_pickle=True",
}
ALLOWED = [
    "model.eval()", "re.compile(text)", "torch.compile(model)", "torch.load(file, weights_only=True)", "yaml.safe_load(text)",
    "yaml.load(text, Loader=yaml.SafeLoader)", "subprocess.run([program], shell=False)", "np.load(file)",
    "AutoModel.from_pretrained(name, trust_remote_code=settings.trust_remote_code)", "load_file('model.safetensors')",
]  # fmt: skip


def test_an_offence_is_detected_and_safe_code_is_allowed():
    assert {source: [*offences(source)] for source in REFUSED} == {source: [offence] for source, offence in REFUSED.items()}
    assert {source: [*offences(source)] for source in ALLOWED} == {source: [] for source in ALLOWED}


def test_every_model_is_loaded_with_an_explicit_trust_remote_code():
    said = {}
    for file in sorted((ROOT / "rlzoo").rglob("*.py")):
        for call in (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)):
            name, words = _dotted(call.func), {keyword.arg: keyword.value for keyword in call.keywords}
            # the loaders of transformers and vLLM
            if re.fullmatch(r"Auto\w+\.from_pretrained", name) or "load_format" in words:
                said[f"{file.name} {name}"] = ast.unparse(words["trust_remote_code"]) if "trust_remote_code" in words else None
    assert {name for name, word in said.items() if word not in ("False", "trust_remote_code")} == set()
    assert said["vllm_sampler.py engine"] == "False"
    assert {"pretrained.py AutoConfig.from_pretrained", "pretrained.py AutoTokenizer.from_pretrained"} <= said.keys()


@pytest.mark.parametrize("name", ["reasoning_gym:../../x", "reasoning_gym:/tmp/x", "../x", "math_file/../x"])
def test_a_tasks_name_cannot_be_a_path(name):
    with pytest.raises(UserError, match="unknown"):
        RunConfig.compose(clip="fspo", overrides=[f"task.name={name}"])


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b"])
def test_a_suites_name_cannot_be_a_path(name, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match="suite"):
        find_suite(name, tmp_path / "data")


@pytest.mark.long
def test_mlflow_telemetry_is_disabled():
    asked = "import os, rlzoo.journal.tracking.uploads, mlflow.telemetry.utils as t; print(t.is_telemetry_disabled())"
    # without other settings that disable it, such as a CI machine or a test
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ}
    for told, expected in ((None, "True"), ("false", "False")):
        given = environment | ({} if told is None else {"MLFLOW_DISABLE_TELEMETRY": told})
        answer = subprocess.run([sys.executable, "-c", asked], env=given, capture_output=True, text=True, check=True)
        assert answer.stdout.strip() == expected
