"""Checks the supply chain: pinned versions, their licences, and known vulnerabilities.

``python -m tests.audit licences`` checks what is installed; ``python -m tests.audit advisories PIP_AUDIT`` queries PyPI's
advisory service for every pinned version. Exit codes: 0 no findings, 1 findings, 3 the service did not respond.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
FINE, FOUND, NOT_ASKED = 0, 1, 3
PINNED_EXTRAS = ("datasets", "deepspeed", "dev", "gguf", "lora", "math-verify", "reasoning-gym")

PERMISSIVE = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python",
    "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Unlicense", "Zlib",
}  # fmt: skip

EXCEPTIONS = {
    "certifi": "MPL-2.0: a list of certificates, used unchanged",
    "tqdm": "MPL-2.0 AND MIT: used unchanged",
    "hypothesis": "MPL-2.0: for the tests alone",
    "pathspec": "MPL-2.0: for mypy, so for development alone",
    "hjson": "MIT and Academic Free License, which asks no more: for DeepSpeed, optional",
    "huey": "MIT by the licence it ships; its metadata does not say",
    "skops": "MIT by the licence it ships; its metadata says no more than 'OSI Approved'",
    "zss": "BSD style by the licence it ships; its metadata does not say",
}
"""Distributions with another licence or without a named licence, and why they are still used."""

ACCEPTED: dict[str, str] = {}
"""Advisories that do not affect rlzoo, by identifier, each with the reason."""

_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Python Software Foundation License": "PSF-2.0",
}
_WORDS = {"apache": "Apache-2.0", "bsd": "BSD-3-Clause", "isc": "ISC", "mit": "MIT", "psf": "PSF-2.0"}


def pins(file: Path = CONSTRAINTS) -> dict[str, str]:
    """Return the pinned versions by normalised name."""
    lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return {_normal(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def needed() -> dict[str, str]:
    """Return what rlzoo and its extras require, recursively, with the installed versions; missing distributions are skipped."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (requirement for name in PINNED_EXTRAS for requirement in project["optional-dependencies"][name])
    waiting = [Requirement(text) for text in (*project["dependencies"], *extras)]
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        asked = waiting.pop()
        name, wanted = _normal(asked.name), frozenset(asked.extras)
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        found[name] = distribution.version.partition("+")[0]  # 2.13.0+cpu is a build of 2.13.0
        for requirement in map(Requirement, distribution.requires or []):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*wanted, "")):
                waiting.append(requirement)
    return dict(sorted(found.items()))


def licence(distribution: metadata.Distribution) -> str:
    """Return the licence as an SPDX expression if the distribution has one, else the text of its licence field."""
    told = dict(distribution.metadata)  # MLflow installs another importlib.metadata, which raises an error for a missing key
    if "License-Expression" in told:
        return str(told["License-Expression"])
    classifiers = [
        line.rpartition(" :: ")[2] for line in distribution.metadata.get_all("Classifier") or [] if line.startswith("License")
    ]
    known = [_CLASSIFIERS.get(name, name) for name in classifiers if name not in ("OSI Approved", "DFSG approved")]
    if known:
        return " AND ".join(known)
    words = told.get("License", "").strip().partition("\n")[0]
    if words in PERMISSIVE or re.fullmatch(r"[\w.\-]+( (AND|OR) [\w.\-]+)+", words):
        return words
    first = re.sub(r"(software )?licen[sc]e|[\d.,\-]|clause|version", " ", words.lower()).split()
    return _WORDS.get(first[0], words) if len(first) == 1 else words or "none named"


def is_permissive(expression: str) -> bool:
    """Whether an SPDX expression allows a choice in which every licence is on the list."""
    choices = expression.replace("(", "").replace(")", "").split(" OR ")
    return any(all(term.strip() in PERMISSIVE for term in choice.split(" AND ")) for choice in choices)


def check_licences(names: Iterable[str]) -> list[str]:
    """Return one line for each distribution whose licence is neither permissive nor an exception."""
    found = []
    for name in names:
        text = licence(metadata.distribution(name))
        if not is_permissive(text) and name not in EXCEPTIONS:
            found.append(f"{name}: {text}")
    return found


def judge(report: Mapping[str, Any] | None, trouble: str) -> tuple[int, list[str]]:
    """Evaluate pip-audit's report: returns an exit code, and lines that give the reasons.

    Args:
        report: its JSON output; None if there was none.
        trouble: its stderr.
    """
    if report is None:
        return NOT_ASKED, [f"the advisory service could not be asked, so nothing is known: {trouble}"]
    packages = report["dependencies"]
    skipped = [f"{package['name']}: {package['skip_reason']}" for package in packages if "skip_reason" in package]
    told = [
        f"{package['name']} {package['version']}: {entry['id']}, mended in {', '.join(entry['fix_versions']) or 'no version'}"
        for package in packages
        for entry in package.get("vulns", [])
        if not {entry["id"], *entry.get("aliases", [])} & ACCEPTED.keys()
    ]
    if told:
        return FOUND, [*told, *skipped]
    if skipped or not packages:  # pip-audit itself reports this as "no known vulnerabilities found"
        about = f"of {len(packages)} packages the advisory service knows nothing of {len(skipped)}, so they were not audited"
        return NOT_ASKED, [about, *skipped]
    return FINE, [f"{len(packages)} packages, no known vulnerability"]


def ask(pip_audit: str) -> tuple[int, list[str]]:
    """Query every pinned version; pip-audit sends names and versions to PyPI."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--timeout", "30", "--format", "json"]
    answer = subprocess.run(
        [pip_audit, "-r", str(CONSTRAINTS), *options], capture_output=True, text=True, check=False, timeout=1800
    )
    try:
        report = json.loads(answer.stdout)
    except ValueError:
        report = None
    return judge(report, (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1])


def main(arguments: list[str]) -> int:
    """Run the command line, and return its exit code."""
    match arguments:
        case ["licences"]:
            names = needed()
            lines = check_licences(names)
            lines += [f"{name} is not pinned in constraints.txt" for name in names if name not in pins()]
            code = FOUND if lines else FINE
            lines = lines or [f"{len(names)} distributions, pinned and under permissive licences or named exceptions"]
        case ["advisories", pip_audit]:
            code, lines = ask(pip_audit)
        case ["pins"]:
            code, lines = FINE, [f"{name}=={version}" for name, version in needed().items()]
        case _:
            code, lines = 2, [str(__doc__)]
    print("\n".join(lines))
    return code


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
