"""Hides from an environment what rlzoo does not require; run by the environment's interpreter: ``python tests/bare.py``.

The environment `installed` borrows the project's libraries, which include the libraries of extras and of developers. With
``RLZOO_BARE`` set, an interpreter of the environment finds only what ``pip install rlzoo-llm`` would install.
"""

import importlib.metadata
import json
import sysconfig
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FINDER = '''
import os, sys
from importlib.machinery import PathFinder

HIDDEN = frozenset({hidden})

class Bare:
    """Finds what is not hidden."""
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if path is None and name in HIDDEN else PathFinder.find_spec(name, path, target)

    invalidate_caches = PathFinder.invalidate_caches
    find_distributions = PathFinder.find_distributions

if "RLZOO_BARE" in os.environ:
    sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
'''


def closure(name: str) -> set[str]:
    """Return the distributions that a distribution requires without extras, recursively."""
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), "")]
    while waiting:
        part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        try:
            lines = importlib.metadata.requires(part[0]) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # for another operating system
        for requirement in map(Requirement, lines):
            if requirement.marker is None or requirement.marker.evaluate({"extra": part[1]}):
                waiting += [(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)]
    return {distribution for distribution, _ in seen}


def hidden() -> list[str]:
    """Return the modules of all other distributions."""
    required = closure("rlzoo-llm")
    modules = importlib.metadata.packages_distributions()
    return sorted(module for module, names in modules.items() if not {canonicalize_name(name) for name in names} & required)


if __name__ == "__main__":
    names = hidden()
    assert {"math_verify", "pytest"} <= set(names), names
    assert not {"torch", "mlflow", "numpy", "rlzoo", "rlzoo_fspo"} & set(names), names
    own = Path(sysconfig.get_path("purelib"))
    (own / "rlzoo_bare.py").write_text(FINDER.format(hidden=json.dumps(names)))
    (own / "rlzoo_bare.pth").write_text("import rlzoo_bare\n")
    print(f"{len(names)} modules that rlzoo does not require are hidden")
