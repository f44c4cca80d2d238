"""The supply chain: pinned versions, permissive licences, and a missing report does not count as a pass."""

import json
import re
import stat
import sys
from importlib import metadata
from pathlib import Path

import pytest

from tests.audit import (
    EXCEPTIONS,
    FINE,
    FOUND,
    NOT_ASKED,
    ask,
    check_licences,
    is_permissive,
    judge,
    licence,
    needed,
    pins,
)


def test_every_version_is_pinned_all_the_way_down():
    # direct requirements, and requirements of these
    assert {"torch", "mlflow", "transformers", "sqlalchemy", "urllib3"} <= needed().keys()
    assert needed().keys() - pins().keys() == set()
    assert all(re.fullmatch(r"[0-9][0-9A-Za-z.]*", version) for version in pins().values())


def test_both_files_of_constraints_pin_the_same_torch():
    assert pins(Path(__file__).parents[1] / "constraints-torch.txt") == {"torch": pins()["torch"]}


def test_every_licence_is_permissive_or_an_exception_with_a_reason():
    assert check_licences(needed()) == []
    assert all(len(reason) > 10 for reason in EXCEPTIONS.values())


@pytest.fixture
def distribution(tmp_path, monkeypatch):
    """Put a distribution with these lines of metadata on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(*lines):
        folder = tmp_path / "planted-1.0.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text("\n".join(["Metadata-Version: 2.4", "Name: planted", "Version: 1.0", *lines]) + "\n")
        return metadata.distribution("planted")

    return make


LICENCES = {
    "MIT": ["License-Expression: MIT"],
    "Apache-2.0 OR GPL-3.0-only": ["License-Expression: Apache-2.0 OR GPL-3.0-only"],
    "Apache-2.0": ["License: Apache Software License 2.0"],
    "BSD-3-Clause": ["License: 3-Clause BSD License"],
    "PSF-2.0": ["License: of its own", "Classifier: License :: OSI Approved :: Python Software Foundation License"],
    "MPL-2.0 AND MIT": ["License: MPL-2.0 AND MIT"],
    "GNU General Public License v3 (GPLv3)": ["Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)"],
    "Proprietary, do not copy": ["License: Proprietary, do not copy"],
    "none named": ["Classifier: License :: OSI Approved"],
}
REFUSED = ("MPL-2.0 AND MIT", "GNU General Public License v3 (GPLv3)", "Proprietary, do not copy", "none named")


@pytest.mark.parametrize("expected", LICENCES)
def test_a_licence_is_read_from_every_metadata_field(distribution, expected):
    assert licence(distribution(*LICENCES[expected])) == expected
    assert is_permissive(expected) == (expected not in REFUSED)
    assert check_licences(["planted"]) == ([f"planted: {expected}"] if expected in REFUSED else [])


def package(name, *vulns, **others):
    return {"name": name, "version": "1.0", "vulns": list(vulns), **others}


KNOWN = {"id": "PYSEC-2026-1", "fix_versions": ["1.1"], "aliases": ["CVE-2026-1"]}
SKIPPED = {"name": "b", "skip_reason": "Dependency not found on PyPI and could not be audited: b (1.0)"}


def test_a_report_passes_only_if_the_service_knew_every_package():
    assert judge({"dependencies": [package("a"), package("b")]}, "") == (FINE, ["2 packages, no known vulnerability"])
    code, lines = judge({"dependencies": [package("a"), SKIPPED]}, "No known vulnerabilities found")
    assert code == NOT_ASKED
    assert lines[0] == "of 2 packages the advisory service knows nothing of 1, so they were not audited"
    assert judge({"dependencies": []}, "")[0] == NOT_ASKED
    assert judge(None, "no route") == (NOT_ASKED, ["the advisory service could not be asked, so nothing is known: no route"])


def test_a_known_vulnerability_is_reported_unless_it_is_accepted(monkeypatch):
    report = {"dependencies": [package("a", KNOWN), SKIPPED]}
    assert judge(report, "") == (FOUND, ["a 1.0: PYSEC-2026-1, mended in 1.1", f"b: {SKIPPED['skip_reason']}"])
    monkeypatch.setitem(sys.modules["tests.audit"].ACCEPTED, "CVE-2026-1", "not reached from here")
    assert judge({"dependencies": [package("a", KNOWN)]}, "")[0] == FINE


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (f"echo '{json.dumps({'dependencies': [package('a')]})}'", FINE),
        ("echo 'requests.exceptions.ConnectionError: no such host' >&2; exit 1", NOT_ASKED),
    ],
)
def test_every_pin_is_audited(tmp_path, body, code):
    auditor = tmp_path / "pip-audit"
    auditor.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/asked\n{body}\n')
    auditor.chmod(auditor.stat().st_mode | stat.S_IXUSR)
    got, lines = ask(str(auditor))
    assert got == code, lines
    assert str(Path(__file__).parents[1] / "constraints.txt") in (tmp_path / "asked").read_text().splitlines()
