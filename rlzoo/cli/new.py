"""`rlzoo clips new`: writes a distribution with a clip policy in it, that installs, keeps the laws and trains as it is."""

from __future__ import annotations

import keyword
from importlib import resources
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from rlzoo.cli.options import loading
from rlzoo.errors import UserError

LONGEST = 40  # characters of a name
TAKEN = {*keyword.kwlist, "Annotated", "ClassVar", "Field", "Width", "ClipBand", "ClipInputs", "ClipPolicy", "ClipResult"}
"""Class names that the written module could not have beside what it imports."""

FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "module.py.txt": "$module.py",
    "tests/test_module.py.txt": "tests/test_$short.py",
}


def clips_new(
    name: Annotated[str, typer.Argument(help="Name of the new policy: lower-case words with hyphens.")],
    folder: Annotated[Path, typer.Option(help="Folder to put rlzoo-NAME in.")] = Path(),
) -> None:
    """Write a distribution with a new policy: module, test, page and packaging, ready to change."""
    with loading():
        from rlzoo.hookspecs import API_VERSION
        from rlzoo.zoo import NAME, load_zoo
    if not NAME.fullmatch(name):
        raise UserError(f"name {name!r}: lower-case words of letters and digits with hyphens between them, such as 'my-rule'")
    zoo = load_zoo()
    if name in zoo:
        raise UserError(f"name {name!r} is taken by {zoo.entries[name].source}; choose another")
    short, title = name.replace("-", "_"), "".join(word.capitalize() for word in name.split("-"))
    if len(name) > LONGEST or title in TAKEN or find_spec(f"rlzoo_{short}"):
        raise UserError(f"name {name!r} cannot be used: too long, or Python or rlzoo has its module or class; choose another")
    words = {
        "name": name,
        "short": short,
        "module": f"rlzoo_{short}",
        "title": title,
        "version": ".".join(version("rlzoo").split(".")[:2]),
        "api": "{}.{}".format(*API_VERSION),
    }
    target = folder / f"rlzoo-{name}"
    if target.exists():
        raise UserError(f"{str(target)!r} exists already; choose another name or folder")
    templates = resources.files("rlzoo") / "assets" / "new_policy"
    try:
        for source, pattern in FILES.items():
            path = target / Template(pattern).substitute(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = templates.joinpath(*source.split("/")).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(words), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error
    module = target / f"{words['module']}.py"
    print(f"wrote {target}; the rule is in {module}")
    print(f"  rlzoo clips check {module}")
    print(f"  rlzoo train --plugin {module} --clip {name} --steps 2")
    print(f"  pip install -e {target} && rlzoo train --clip {name} --steps 2")
