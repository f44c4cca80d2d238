"""``new``: writes an installable distribution that contains a working rule, estimator or correction."""

from __future__ import annotations

import keyword
import shlex
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template

import rlzoo
from rlzoo.cli.kinds import CLIPS, Kind
from rlzoo.cli.options import loading
from rlzoo.core.discovery import DISTRIBUTION
from rlzoo.core.errors import UserError
from rlzoo.support.distribution import version

TAKEN = {*keyword.kwlist, *rlzoo.__all__, "Annotated", "ClassVar", "Field", "Tensor"}
"""Class names that would clash with keywords or with imports in the generated module."""


def write(kind: Kind, name: str, folder: Path) -> None:
    """Write a distribution into a new folder.

    Raises:
        UserError: the name is taken or invalid, or the folder cannot be written.
    """
    with loading():
        from rlzoo.core.hookspecs import API_VERSION
        from rlzoo.core.zoo import NAME
    if not NAME.fullmatch(name):
        raise UserError(f"name {name!r}: expected lower-case words of letters and digits, joined by hyphens, such as 'my-rule'")
    shelf = kind.shelf()
    short, title = name.replace("-", "_"), "".join(word.capitalize() for word in name.split("-"))
    registered = name if kind is CLIPS else short
    if registered in shelf:
        raise UserError(f"name {registered!r} is taken by {shelf.entries[registered].source}; choose another")
    if find_spec(f"rlzoo_{short}"):
        raise UserError(f"name {name!r}: a module rlzoo_{short} is already installed; choose another")
    if title in TAKEN:
        raise UserError(f"name {name!r}: the class {title} would clash with a name that its module imports; choose another")
    words = {
        "name": name,
        "part": registered,
        "short": short,
        "module": f"rlzoo_{short}",
        "title": title,
        "what": kind.what,
        "command": kind.command,
        "option": f"--clip {registered}" if kind is CLIPS else f"--clip grpo --set {kind.key}={registered}",
        "requirement": f"{DISTRIBUTION}>={'.'.join(version().split('.')[:2])}",
        "api": "{}.{}".format(*API_VERSION),
    }
    target = folder / f"rlzoo-{name}"
    if target.exists():
        raise UserError(f"{str(target)!r} already exists; choose another name or folder")
    files = {
        "pyproject.toml.txt": "pyproject.toml",
        "README.md.txt": "README.md",
        f"{kind.folder}/module.py.txt": "$module.py",
        f"{kind.folder}/test_module.py.txt": "tests/test_$short.py",
    }
    templates = resources.files("rlzoo.cli") / "assets" / "new"
    try:
        for source, pattern in files.items():
            path = target / Template(pattern).substitute(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = templates.joinpath(*source.split("/")).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(words), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error
    module = target / f"{words['module']}.py"
    print(f"wrote {target}; {'the rule' if kind is CLIPS else kind.what} is in {module}")
    file, project = shlex.quote(str(module)), shlex.quote(str(target))
    print(f"  rlzoo {kind.command} check {file}")
    print(f"  rlzoo train --plugin {file} {words['option']} --steps 2")
    print(f"  pip install -e {project} && rlzoo train {words['option']} --steps 2")
