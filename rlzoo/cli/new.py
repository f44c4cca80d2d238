"""`rlzoo clips new`: writes a distribution with a clip policy in it, that installs, keeps the laws and trains as it is."""

from __future__ import annotations

from importlib import resources
from importlib.metadata import version
from pathlib import Path
from string import Template

from rlzoo.errors import UserError
from rlzoo.hookspecs import API_VERSION
from rlzoo.zoo import NAME, load_zoo

FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "module.py.txt": "$module.py",
    "tests/test_module.py.txt": "tests/test_$short.py",
}


def write_distribution(name: str, folder: Path) -> None:
    """Write ``rlzoo-NAME`` into the folder and say what to do next."""
    if not NAME.fullmatch(name):
        raise UserError(f"name {name!r}: lower-case words of letters and digits with hyphens between them, such as 'my-rule'")
    zoo = load_zoo()
    if name in zoo:
        raise UserError(f"name {name!r} is taken by {zoo.entries[name].source}; choose another")
    short = name.replace("-", "_")
    words = {
        "name": name,
        "short": short,
        "module": f"rlzoo_{short}",
        "title": "".join(word.capitalize() for word in name.split("-")),
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
