"""Every imported library is required: at the top of a module by the project, within a function by the project or an extra."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"rlzoo", *(folder.name for folder in (ROOT / "plugins").iterdir())}
ELSEWHERE = {"IPython"}  # there whenever rlzoo runs in a notebook
OPTIONAL = {
    "datasets": {"rlzoo/tasks/math_rows.py"},
    "deepspeed": {"rlzoo/learner/optimization.py"},
    "gguf": {"rlzoo/models/gguf.py"},
    "math_verify": {"rlzoo/tasks/math_grading.py"},
    "nltk": {"plugins/rlzoo_textarena/__init__.py"},
    "openenv": {"plugins/rlzoo_openenv/__init__.py"},
    "peft": {"rlzoo/models/adapters.py"},
    "pyarrow": {"rlzoo/tasks/math_rows.py"},
    "ray": {"rlzoo/lab/on_ray.py"},
    "reasoning_gym": {"plugins/rlzoo_reasoning_gym/__init__.py"},
    "requests": {"plugins/rlzoo_openenv/__init__.py"},
    "textarena": {"plugins/rlzoo_textarena/__init__.py"},
    "vllm": {"rlzoo/rollout/vllm_model.py", "rlzoo/rollout/vllm_sampler.py"},
    "verifiers": {"plugins/rlzoo_verifiers/__init__.py"},
}
"""Libraries from extras only, and where they are imported: only after a check that names the extra to install."""
INSIDE = {
    "trl": {"rlzoo/integrations/trl.py"},
    "verl": {"rlzoo/integrations/verl.py"},
}
"""Other trainers and their requirements, and the modules for their users."""
DEVELOPERS = {"pytest"}  # of `rlzoo.testing`; a plugin's author has it


def names(requirements):
    return {re.split(r"[\[<>=!~;\s]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


def imports(node, within=False):
    """Yield each imported top-level package, and whether the import waits for a function call, or is only for types."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name.split(".")[0], within) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").split(".")[0], within
        is_typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        yield from imports(child, within or is_typing or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_imported_library_is_required():
    distributions = packages_distributions()
    required = names(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    wanted = required | names(line for extra, lines in extras.items() if extra != "dev" for line in lines)
    seen, wrong = set(), []
    for source in sorted([*(ROOT / "rlzoo").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")]):
        for package, within in imports(ast.parse(source.read_text())):
            if package in sys.stdlib_module_names | OURS | ELSEWHERE or (within and package in DEVELOPERS):
                continue
            seen.add(package)
            if source.relative_to(ROOT).as_posix() in INSIDE.get(package, ()):
                continue
            providers = names(distributions.get(package, [package]))
            place = source.relative_to(ROOT).as_posix()
            is_reached = within and place in OPTIONAL.get(package, ())
            if not providers & (wanted if is_reached else required):
                wrong.append(f"{place}: {package}, {'in a function' if within else 'at its top'}")
    assert {"torch", "mlflow", "transformers", "peft"} <= seen
    assert wrong == []


APART = {"openenv", "verifiers", "vllm", "dev"}
"""Extras that `all` omits; the comment in pyproject.toml says why."""


def test_the_all_extra_includes_every_compatible_extra():
    extras = PROJECT["optional-dependencies"]
    (requirement,) = extras["all"]
    assert re.fullmatch(r"rlzoo-llm\[.+\]", requirement)
    assert set(requirement[len("rlzoo-llm[") : -1].split(",")) == extras.keys() - APART - {"all"}
