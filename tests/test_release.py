"""Problems that prevent a release are found and reported with what to do."""

import subprocess
from datetime import date, timedelta

import pytest

from tests.release import problems

TODAY = date(2026, 3, 4)


@pytest.fixture(autouse=True)
def today(monkeypatch):
    """Stop the calendar, because a test may run over midnight."""

    class Stopped(date):
        @classmethod
        def today(cls):
            return TODAY

    monkeypatch.setattr("tests.release.date", Stopped)


@pytest.fixture
def checkout(tmp_path):
    """Write a checkout of version 1.2.0 that is ready except for what is given; its files are committed."""

    def make(*, version="1.2.0", heading=f"## 1.2.0 ({TODAY})", cited="1.2.0", released=TODAY, below="", tag=None, code=""):
        (tmp_path / "discovery.py").write_text(code)
        (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "made"\nversion = "{version}"\n')
        (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{heading}\n\n- A line.\n\n{below}\n\n## 1.1.0 (2026-01-02)\n")
        (tmp_path / "CITATION.cff").write_text(f"title: made\nversion: {cited}\ndate-released: {released}\n")
        who = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
        for words in (
            ["init", "-q"],
            ["add", "."],
            [*who, "commit", "-q", "--allow-empty", "-m", "ready"],
            ["tag", tag] if tag else ["status"],
        ):
            subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True)
        return tmp_path

    return make


def test_a_checkout_that_is_ready_has_no_problem(checkout):
    assert problems(checkout()) == []
    assert problems(checkout(tag="v1.2.0"), tag="v1.2.0") == []  # as in the workflow, after the tag was pushed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"heading": "## Unreleased"}, f"its first heading is '## Unreleased'; make it '## 1.2.0 ({TODAY})'"),
        ({"heading": "## 1.2.0"}, "'## 1.2.0' has no date"),
        ({"heading": "## 1.2.0 (soon)"}, "'## 1.2.0 (soon)' has no date"),
        ({"heading": f"## 1.2.0 ({TODAY + timedelta(days=2)})"}, "which is in the future"),
        ({"heading": f"## 1.3.0 ({TODAY})"}, f"its first heading is '## 1.3.0 ({TODAY})'"),
        ({"below": "## Unreleased\n\n- Left."}, "'Unreleased' are left over"),
        ({"cited": "1.1.0"}, "CITATION.cff: version 1.1.0, but 1.2.0 in pyproject.toml"),
        ({"released": "2026-01-02"}, f"date-released is 2026-01-02, but {TODAY} in CHANGELOG.md"),
        ({"code": "PUBLISHED = False\n"}, "discovery.py: placeholders are left"),
        ({"code": "https://github.com/OWNER/rlzoo\n"}, "discovery.py: placeholders are left"),
        ({"tag": "v1.2.0"}, "the tag v1.2.0 exists already"),
    ],
)
def test_each_problem_is_reported_alone(checkout, given, expected):
    (line,) = problems(checkout(**given))
    assert expected in line


def test_a_file_that_is_not_committed_is_counted(checkout):
    folder = checkout()
    (folder / "pyproject.toml").write_text('[project]\nname = "changed"\nversion = "1.2.0"\n')
    (folder / "new.txt").touch()
    assert problems(folder) == ["2 files are not committed: commit or remove them"]


def test_a_tag_of_another_version_is_refused(checkout):
    assert problems(checkout(), tag="v1.2.1") == ["the tag v1.2.1 is not v1.2.0, the version in pyproject.toml"]
