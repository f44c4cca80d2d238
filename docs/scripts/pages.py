"""Collects the site's pages: docs, the rules, SECURITY.md and CHANGELOG.md, with links that work on the site.

``python -m docs.scripts.pages`` writes them to ``build/docs``, from where ``zensical build`` reads them. A link to another file
of the repository leads to a page that shows this file, so the site depends on no other address.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
STAGE = ROOT / "build" / "docs"
LINK = re.compile(r"(?<=\]\()(?P<target>[^()\s#]+)(?P<anchor>#[^()\s]*)?(?=\))")
FENCED = re.compile(r"^(````*)[^`\n]*\n.*?^\1$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^ *<!--.*?-->$", re.MULTILINE)
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".json": "json"}
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
"""Front matter of pages that only show a file; it excludes them from the search."""


def sources() -> list[Path]:
    """Return the pages and all other files in docs, as paths relative to the repository."""
    beside = [path for path in (ROOT / "docs").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")]
    found = [*beside, *(ROOT / "plugins").glob("*/README.md"), ROOT / "SECURITY.md", ROOT / "CHANGELOG.md"]
    return sorted(path.relative_to(ROOT) for path in found)


def home(source: Path) -> str:
    """Return the path of a file or folder of the repository within the site's folder of pages.

    Example:
        >>> home(Path("plugins/rlzoo_gspo_token/README.md")), home(Path("docs/how-to/vllm.md")), home(Path("configs/dapo.yaml"))
        ('rules/gspo-token.md', 'how-to/vllm.md', 'files/configs/dapo.yaml.md')
    """
    match source.parts:
        case ("plugins", folder, "README.md"):
            return f"rules/{folder.removeprefix('rlzoo_').replace('_', '-')}.md"
        case ("docs", *rest) if not (ROOT / source).is_dir():
            return "/".join(rest)
        case ("SECURITY.md" | "CHANGELOG.md" as name,):
            return name.lower()
        case ("README.md",):
            return "index.md"
    path = f"files/{source.as_posix()}".lower()
    if (ROOT / source).is_dir():
        return f"{path}/index.md"
    return path if source.suffix == ".md" else f"{path}.md"


def stage(folder: Path = STAGE) -> None:
    """Write every page, and every file that a page links to."""
    shutil.rmtree(folder, ignore_errors=True)
    queue = sources()
    seen = {*queue, Path("README.md")}  # on the site, docs/index.md replaces README.md
    while queue:
        source = queue.pop()
        target = folder / home(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md" and source.parts[0] == "docs" and (ROOT / source).is_file():
            shutil.copyfile(ROOT / source, target)  # pictures and data
            continue
        text = content(source)
        fresh = [path for path in linked(source, text) if path not in seen and (ROOT / path).exists()]
        seen.update(fresh)
        queue += fresh
        target.write_text(rewritten(source, text), encoding="utf-8")


def content(source: Path) -> str:
    """Return the text of a page: a list of files for a folder, and the content for a file."""
    path = ROOT / source
    if path.is_dir():
        inner = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file() and _is_shown(file))
        lines = [f"- [{file.as_posix()}]({source.name}/{file.as_posix()})" for file in inner]
        return f"{HIDDEN}# {source.as_posix()}\n\n" + "\n".join(lines) + "\n"
    text = path.read_text(encoding="utf-8")
    if source.suffix == ".md":
        return text if home(source).partition("/")[0] != "files" else HIDDEN + text
    if source.suffix == ".ipynb":
        return HIDDEN + notebook(text)
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{HIDDEN}# {source.as_posix()}\n\n{fence}{LANGUAGES.get(source.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def notebook(text: str) -> str:
    """Return a notebook's cells and their outputs as Markdown."""
    parts = list[str]()
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for data in (output["data"] for output in cell.get("outputs", ()) if "data" in output):
            shown, image = "".join(data["text/plain"]), data.get("image/png")
            parts.append(f"![{shown}](data:image/png;base64,{image.strip()})" if image else f"```text\n{shown}\n```")
    return "\n\n".join(parts) + "\n"


def _is_shown(file: Path) -> bool:
    return not any(part.startswith((".", "__pycache__")) or part.endswith(".egg-info") for part in file.relative_to(ROOT).parts)


def linked(source: Path, text: str) -> list[Path]:
    """Return the repository's files that a page links to."""
    return [target for target, _ in _links(source, text) if target is not None]


def _links(source: Path, text: str) -> Iterator[tuple[Path | None, str]]:
    for part in prose(text):
        for link in LINK.finditer(part):
            yield _target(source, link["target"]), link["anchor"] or ""


def _target(source: Path, link: str) -> Path | None:
    """Return the file that a link points to, relative to the repository; None if it is outside the repository."""
    if ":" in link:
        return None
    path = Path(os.path.normpath(ROOT / source.parent / link))
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else None


def prose(text: str) -> list[str]:
    """Return a page's text between its code blocks."""
    return FENCED.sub("\0", text).split("\0")


def rewritten(source: Path, text: str) -> str:
    """Return the page for the site, with links to the new paths and without comments, which would end lists and tables."""
    base = PurePosixPath(home(source)).parent

    def new(link: re.Match[str]) -> str:
        target = _target(source, link["target"])
        if target is None or not (ROOT / target).exists():
            return link[0]  # outside the repository, or broken: the build reports these
        return os.path.relpath(home(target), base) + (link["anchor"] or "")

    blocks = [match[0] for match in FENCED.finditer(text)]
    parts = [LINK.sub(new, COMMENT.sub("", part)) for part in prose(text)]
    return parts[0] + "".join(block + part for block, part in zip(blocks, parts[1:], strict=True))


def navigation() -> list[str]:
    """Return the pages in the site's navigation, in order."""
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    return list(_flat(settings["project"]["nav"]))


def _flat(entry: object) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict | list):
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from _flat(inner)


if __name__ == "__main__":
    stage()
    print(f"{sum(1 for _ in STAGE.rglob('*.md'))} pages in {STAGE.relative_to(ROOT)}", file=sys.stderr)
