"""Checks every link on the pages, in the repository and in the built site.

``python -m docs.scripts.links`` reads README.md, SECURITY.md, CHANGELOG.md, the rules' pages, docs and ``build/site``.
Nothing is fetched: for external addresses, only the form is checked. The site must not load external resources, so that it
works without a network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from docs.scripts.pages import FENCED, ROOT

SITE = ROOT / "build" / "site"
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
LINK = re.compile(r"\]\(<?(?P<target>[^()\s>]*)>?(?:\s+\"[^\"]*\")?\)")
HEADING = re.compile(r"^#{1,6}\s+(?P<text>.*?)\s*#*$", re.MULTILINE)
LOADED = {("script", "src"), ("img", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("video", "src")}
"""Attributes whose targets a browser loads automatically."""


def markdown_files() -> list[Path]:
    """Return the Markdown pages of the repository."""
    tops = [ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md")]
    return [*tops, *sorted((ROOT / "plugins").glob("*/README.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def markdown_problems(files: Iterable[Path]) -> Iterator[str]:
    """Yield problems with the links on pages, resolved as in a repository browser."""
    for file in files:
        text = FENCED.sub("", file.read_text(encoding="utf-8"))
        for link in LINK.finditer(INLINE_CODE.sub("", text)):
            problem = _markdown_problem(file, link["target"])
            if problem:
                yield f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}: {link['target']}: {problem}"


def _markdown_problem(file: Path, link: str) -> str | None:
    if ":" in link.partition("#")[0]:
        return malformed(link)
    path, _, anchor = link.partition("#")
    target = (file.parent / unquote(path)).resolve() if path else file
    if not target.exists():
        return "no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target):
        return f"no such heading (there are: {', '.join(anchors(target))})"
    return None


def malformed(link: str) -> str | None:
    """Return the problem with the form of an external address, or None.

    Example:
        >>> malformed("https:/example.org"), malformed("https://example.org/a#b")
        ('the host is missing', None)
    """
    try:
        parts = urlsplit(link)
        host = parts.hostname or ""
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme == "mailto":
        return None if re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", parts.path) else "not a mail address"
    if parts.scheme not in ("http", "https"):
        return f"unknown scheme {parts.scheme!r}"
    if not host:
        return "the host is missing"
    return None if re.fullmatch(r"[\w-]+(\.[\w-]+)+|localhost", host) else f"{host!r} is not a host name"


@cache
def anchors(file: Path) -> tuple[str, ...]:
    """Return the anchors that a repository browser gives the headings of a page."""
    seen: dict[str, int] = {}
    found = []
    for heading in HEADING.finditer(FENCED.sub("", file.read_text(encoding="utf-8"))):
        text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading["text"])
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.append(f"{slug}-{count}" if count else slug)
    return tuple(found)


class _Page(HTMLParser):
    """The anchors and the links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[tuple[str, str]] = []  # the tag and its target
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := given.get(name))}
        for name in ("href", "src"):
            value = given.get(name)
            if value is None:
                continue
            self.links.append((tag, value))
            # a canonical or alternate address is not fetched
            if (tag, name) in LOADED and given.get("rel") not in ("canonical", "alternate", "prev", "next"):
                self.loaded.append(value)


def site_problems(site: Path) -> Iterator[str]:
    """Yield problems with the links in the built site, and external resources that it would load."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"no pages in {site}"
    for path, page in pages.items():
        where = path.relative_to(site)
        for tag, link in page.links:
            problem = _site_problem(site, pages, path, link)
            if problem:
                yield f"{where}: <{tag}> {link}: {problem}"
        yield from (f"{where}: {link}: loaded from outside" for link in page.loaded if urlsplit(link).netloc)


def _site_problem(site: Path, pages: Mapping[Path, _Page], page: Path, link: str) -> str | None:
    parts = urlsplit(link)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        return malformed(link)
    start = site if parts.path.startswith("/") else page.parent
    target = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else page
    if target.is_dir():
        target /= "index.html"
    if not target.exists():
        return "no such page"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
        return "no such anchor"
    return None


def main() -> int:
    """Print all problems; the exit code is 1 if there are any."""
    files = markdown_files()
    problems = [*markdown_problems(files), *site_problems(SITE)]
    print("\n".join(problems) or f"all links in {len(files)} files and {sum(1 for _ in SITE.rglob('*.html'))} pages work")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
