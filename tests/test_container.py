"""The container gets the content of the wheel and the pinned versions."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_image_contains_the_files_of_the_wheel_and_the_pins():
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
