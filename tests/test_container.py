"""The container gets the content of the wheel, with the pinned versions, for a non-root user."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINES = (ROOT / "Containerfile").read_text().splitlines()


def test_the_files_of_the_wheel_and_the_pins_are_let_into_the_image():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = settings["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {
        *wheel["only-include"],
        *wheel["force-include"],
        *settings["project"]["license-files"],
        settings["project"]["readme"],
    }
    assert allowed == {*needed, "pyproject.toml", "constraints.txt"}
    assert all((ROOT / name).exists() for name in allowed)


def test_every_installation_is_under_the_constraints_and_the_last_user_is_not_root():
    installs = [line for line in LINES if "pip install" in line]
    assert installs
    assert all("--constraint /opt/constraints.txt" in line for line in installs)
    assert [line for line in LINES if line.startswith("USER")] == ["USER rlzoo"]
