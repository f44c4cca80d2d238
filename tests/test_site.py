"""The documentation's site: its navigation, its links, and its commands."""

import os
import subprocess
import textwrap
from pathlib import Path

import pytest

from docs.scripts import links, pages, runnable
from tests import examples
from tests.zygote import shadowing

ROOT = Path(__file__).resolve().parents[1]


def test_the_navigation_lists_every_existing_page_exactly_once():
    named = pages.navigation()
    there = [pages.home(source) for source in pages.sources() if source.suffix == ".md"]
    assert sorted(named) == sorted(there)  # a page named twice would appear twice


def test_a_link_leads_to_the_same_file_in_the_site(tmp_path):
    pages.stage(tmp_path)
    for source in pages.sources():
        if source.suffix != ".md":
            continue
        meant = pages.linked(source, (ROOT / source).read_text(encoding="utf-8"))
        page = tmp_path / pages.home(source)
        found = [
            (page.parent / link["target"]).resolve()
            for part in pages.prose(page.read_text(encoding="utf-8"))
            for link in pages.LINK.finditer(part)
            if ":" not in link["target"]
        ]
        assert found == [(tmp_path / pages.home(target)).resolve() for target in meant], source
        assert all(path.is_file() for path in found), source


def test_a_linked_file_is_shown_verbatim(tmp_path):
    pages.stage(tmp_path)
    shown = (tmp_path / "files" / "configs" / "smollm2-text.yaml.md").read_text(encoding="utf-8")
    assert (ROOT / "configs" / "smollm2-text.yaml").read_text(encoding="utf-8").rstrip() in shown


def test_links_in_code_are_unchanged_and_comments_are_removed_from_the_site():
    text = "<!-- generated: x -->\n[a](../../SECURITY.md#reporting)\n\n```\n[b](../../SECURITY.md)\n<!-- kept -->\n```\n"
    expected = "\n[a](../security.md#reporting)\n\n```\n[b](../../SECURITY.md)\n<!-- kept -->\n```\n"
    assert pages.rewritten(Path("docs/how-to/vllm.md"), text) == expected


def test_every_link_in_the_repository_leads_to_a_page_and_heading():
    assert list(links.markdown_problems(links.markdown_files())) == []


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("other.md", None),
        ("other.md#a-heading-with-code", None),
        ("other.md#a-heading-with-code-1", None),
        ("#here", None),
        ("https://example.org/a?b=c#d", None),
        ("missing.md", "no such file"),
        ("other.md#a-heading", "no such heading"),
        ("#there", "no such heading"),
        ("https://", "the host is missing"),
        ("https://example/a", "'example' is not a host name"),
        ("htps://example.org", "unknown scheme 'htps'"),
        ("https://example.org:many/", "could not be cast"),
    ],
)
def test_a_wrong_link_is_reported_with_its_problem(tmp_path, link, problem):
    (tmp_path / "other.md").write_text("# A heading, with `code`\n\n```\n# A heading\n```\n\n## A heading with code\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n\n[text]({link})\n\n`[code](nowhere.md)`\n")
    found = list(links.markdown_problems([page]))
    assert len(found) == (problem is not None), found
    assert not problem or problem in found[0]


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        ('<a href="other/">x</a>', None),
        ('<a href="other/#part">x</a>', None),
        ('<a href="https://example.org">x</a>', None),
        ('<a href="missing/">x</a>', "no such page"),
        ('<a href="other/#whole">x</a>', "no such anchor"),
        ('<img src="picture.png">', "no such page"),
        ('<script src="https://example.org/x.js"></script>', "loaded from outside"),
        ('<link rel="stylesheet" href="https://example.org/x.css">', "loaded from outside"),
    ],
)
def test_a_wrong_link_of_the_built_site_is_reported(tmp_path, html, problem):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.html").write_text('<h1 id="part">Other</h1>')
    (tmp_path / "index.html").write_text(html)
    found = list(links.site_problems(tmp_path))
    assert len(found) == (problem is not None), found
    assert not problem or problem in found[0]


def test_a_folder_without_pages_is_not_a_site(tmp_path):
    assert list(links.site_problems(tmp_path)) == [f"no pages in {tmp_path}"]


PAGE = textwrap.dedent("""\
    # A page

    <!-- file: words.txt -->
    ```text
    one
    two
    ```

    <!-- runnable -->
    ```
    wc -l < words.txt > count.txt
    ```

    ```
    false
    ```

    <!-- runnable -->
    ```python
    assert open("count.txt").read().strip() == "2"
    ```
    """)


def test_only_marked_blocks_run_in_order_in_one_folder(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert runnable.run_page(page)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" in ")[0] for line in lines] == [f"ran {page}:10", f"ran {page}:19"]


@pytest.mark.parametrize(
    ("block", "said"),
    [("false\ntouch never", "FAILED (exit code 1)"), ("false | true\ntouch never", "FAILED (exit code 1)")],
)
def test_a_command_that_fails_ends_its_page(tmp_path, capsys, block, said):
    page = tmp_path / "page.md"
    page.write_text(f"<!-- runnable -->\n```\n{block}\n```\n\n<!-- runnable -->\n```\ntrue\n```\n")
    assert not runnable.run_page(page)
    out = capsys.readouterr().out
    assert said in out
    assert "ran " not in out


def test_a_command_that_does_not_end_is_stopped_with_its_children(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- runnable -->\n```\nsleep 60 & sleep 60\n```\n")
    assert not runnable.run_page(page, limit=0.5)
    assert "stopped after 0.5 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sample", "missing"),
    [
        ("one\n...\nfour\n", ""),
        ("two\nthree\n", ""),
        ("...\nfour\n...\n", ""),
        ("two\nfour\n", "two\nfour\n"),
        ("four\n...\none\n", "one\n"),
        ("one\n...\none\n", "one\n"),
        ("our\n", "our\n"),
        ("on\n", "on\n"),
    ],
)
def test_a_sample_has_the_printed_lines_in_order(sample, missing):
    assert runnable.not_printed(sample, "one  \ntwo\nthree\nfour\n") == missing


@pytest.mark.parametrize("number", ["0.25", "0.5"])
def test_a_sample_with_another_number_fails_its_page(tmp_path, capsys, number):
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- runnable -->\n```\necho $PWD; echo 0.25\n```\n\ntext\n\n<!-- output -->\n```text\n"
        f"FOLDER\n{number}\n```\n\n<!-- runnable -->\n```\ntrue\n```\n"
    )
    assert runnable.run_page(page) == (number == "0.25")
    assert (f"NOT PRINTED {page}:9:" in capsys.readouterr().out) == (number == "0.5")


def test_every_output_of_a_repeatable_command_is_compared():
    found = {page.name: runnable.uncompared(page.read_text(encoding="utf-8")) for page in runnable.pages()}
    assert not {name: lines for name, lines in found.items() if lines}, "mark with <!-- output -->"
    block = "<!-- runnable -->\n```bash\n{}\n```\n\n```text\nprinted\n```\n"
    assert runnable.uncompared(block.format("rlzoo clips show fspo")) == [6]
    assert runnable.uncompared(block.format("rlzoo clips check a.py\nrlzoo train --clip fspo")) == []


GUIDES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "tutorial.md",
    *(ROOT / "docs" / "how-to").glob("*.md"),
]


def test_every_command_of_the_guides_is_run_or_states_its_needs():
    found = {page.name: runnable.unmarked(page.read_text(encoding="utf-8")) for page in GUIDES}
    assert not {name: lines for name, lines in found.items() if lines}, f"mark with runnable, or needs: {list(runnable.NEEDS)}"


@pytest.mark.parametrize(
    ("marker", "lines"),
    [
        ("", [2]),
        ("<!-- needs: -->", [2]),
        ("<!-- needs: magic -->", [2]),
        ("<!-- runnable-->", [2]),
        ("<!-- runnable -->", []),
        ("<!-- file: a.py -->", []),
        ("<!-- needs: vllm -->", []),
    ],
)
@pytest.mark.parametrize("indent", ["", "    "])
@pytest.mark.parametrize("language", ["", "python", "bash"])
def test_a_command_without_a_known_marker_is_reported_with_its_line(marker, lines, indent, language):
    block = f"{indent}{marker}\n{indent}```{language}\n{indent}true\n{indent}```\n"
    output = "\n```text\n```\n"
    assert runnable.unmarked(block + output) == lines


def test_every_example_is_run_or_states_its_needs(monkeypatch):
    assert examples.unnamed() == []
    monkeypatch.setattr(examples, "EXAMPLES", {"quickstart.py": "", "gone.py": ""})
    assert {"custom_reward.py", "gone.py"} <= set(examples.unnamed())


def test_commands_in_how_tos_run_as_written_or_shortened(tmp_path, monkeypatch):
    command = tmp_path / "rlzoo"
    command.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/given\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    commands = ["train --steps 9", "train --dry-run", "train --resume", "sweep --seeds 5", "calibrate", "clips list"]
    lines = "\n".join(f"X= rlzoo {command}" for command in commands)
    page = tmp_path / "page.md"
    page.write_text(f"<!-- before: rlzoo train -->\n<!-- runnable -->\n```\n{lines}\n```\n")
    short = f"--steps 2 {runnable.SHORT}"
    shortened = [
        f"{commands[0]} {short}",
        *commands[1:3],
        f"{commands[3]} {short} --seeds 1",
        f"calibrate {short}",
        "clips list",
    ]
    for steps, expected in ((2, shortened), (None, commands)):
        assert runnable.run_page(page, steps=steps)
        assert (tmp_path / "given").read_text().splitlines() == ["train", *expected]
        (tmp_path / "given").unlink()


def test_a_page_may_write_into_folders_and_use_the_examples(tmp_path):
    page = tmp_path / "page.md"
    block = "grep one questions/words.txt && test -f examples/quickstart.py"
    page.write_text(f"<!-- file: questions/words.txt -->\n```text\none\n```\n\n<!-- runnable -->\n```\n{block}\n```\n")
    assert runnable.run_page(page)


@pytest.mark.long
def test_a_forked_command_has_its_own_output_and_exit_code(zygote, tmp_path):
    with shadowing(zygote) as folder:
        environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        command = ["bash", "-c", "rlzoo clips list | grep -c grpo && rlzoo clips show none-such"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip().isdigit()) == (2, True)
    assert "unknown rule 'none-such'" in done.stderr
