"""``new``: writes an installable distribution with a working rule, estimator or correction."""

from __future__ import annotations

import keyword
import shlex
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlzoo.cli.options import loading
from rlzoo.errors import UserError
from rlzoo.support.distribution import DISTRIBUTION, version

if TYPE_CHECKING:
    from rlzoo.zoo import Shelf

LONGEST = 40  # characters of a name
TAKEN = {
    *keyword.kwlist, "Annotated", "ClassVar", "Field", "Width", "ClipBand", "ClipInputs", "ClipPolicy", "ClipResult",
    "AdvantageEstimator", "AdvantageInputs", "Correction", "CorrectionInputs", "Tensor",
}  # fmt: skip
"""Class names that would clash with keywords or with imports in the generated module."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the new plugin: lower-case words with hyphens.")]
Folder = Annotated[Path, typer.Option(help="Folder in which to create rlzoo-NAME.")]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of plugin, and what `new` writes for it."""

    command: str  # name of the rlzoo command, such as clips
    what: str  # name of the kind, with its article
    folder: str  # folder of the templates
    option: str  # options of `rlzoo train`, with $part for the name


POLICY = Kind("clips", "a rule", "policy", "--clip $part")
ADVANTAGE = Kind("advantages", "an advantage estimator", "advantage", "--clip grpo --set clip.advantage=$part")
CORRECTION = Kind("corrections", "a mismatch correction", "correction", "--clip grpo --set correction=$part")


def clips_new(name: Name, folder: Folder = Path()) -> None:
    """Write a starter distribution for a new rule: module, test, README and packaging."""
    write(POLICY, name, folder)


def advantages_new(name: Name, folder: Folder = Path()) -> None:
    """Write a starter distribution for a new advantage estimator: module, test, README and packaging."""
    write(ADVANTAGE, name, folder)


def corrections_new(name: Name, folder: Folder = Path()) -> None:
    """Write a starter distribution for a new correction: module, test, README and packaging."""
    write(CORRECTION, name, folder)


def write(kind: Kind, name: str, folder: Path) -> None:
    """Write a distribution into a new folder.

    Raises:
        UserError: the name is taken or not valid, or the folder cannot be written.
    """
    with loading():
        from rlzoo.hookspecs import API_VERSION
        from rlzoo.zoo import NAME, load_zoo
    if not NAME.fullmatch(name):
        raise UserError(f"name {name!r}: expected lower-case words of letters and digits, joined by hyphens, such as 'my-rule'")
    zoo = load_zoo()
    shelf: Shelf[Any] = zoo if kind is POLICY else getattr(zoo, kind.command)
    short, title = name.replace("-", "_"), "".join(word.capitalize() for word in name.split("-"))
    part = name if kind is POLICY else short
    if part in shelf:
        raise UserError(f"name {part!r} is taken by {shelf.entries[part].source}; choose another")
    if len(name) > LONGEST or title in TAKEN or find_spec(f"rlzoo_{short}"):
        raise UserError(
            f"name {name!r} cannot be used: it is too long, or its module or class name is already in use; choose another"
        )
    words = {
        "name": name,
        "part": part,
        "short": short,
        "module": f"rlzoo_{short}",
        "title": title,
        "what": kind.what,
        "command": kind.command,
        "option": Template(kind.option).substitute(part=part),
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
    templates = resources.files("rlzoo") / "assets" / "new"
    try:
        for source, pattern in files.items():
            path = target / Template(pattern).substitute(words)
            path.parent.mkdir(parents=True, exist_ok=True)
            text = templates.joinpath(*source.split("/")).read_text(encoding="utf-8")
            path.write_text(Template(text).substitute(words), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{str(target)!r} cannot be written: {error.strerror or error}") from error
    module = target / f"{words['module']}.py"
    print(f"wrote {target}; {'the rule' if kind is POLICY else kind.what} is in {module}")
    file, project = shlex.quote(str(module)), shlex.quote(str(target))
    print(f"  rlzoo {kind.command} check {file}")
    print(f"  rlzoo train --plugin {file} {words['option']} --steps 2")
    print(f"  pip install -e {project} && rlzoo train {words['option']} --steps 2")
