"""Checks the wheel and the sdist in the given folder: they contain everything needed, and nothing else."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LARGEST = 2_000_000  # bytes; the shipped model has half a million
(wheel,), (sdist,) = (list(Path(sys.argv[1]).glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))

with zipfile.ZipFile(wheel) as archive:
    sizes = {info.filename: info.file_size for info in archive.infolist()}
packages = {"rlzoo", *(folder.name for folder in (ROOT / "plugins").iterdir() if (folder / "__init__.py").is_file())}
tops = {name.partition("/")[0] for name in sizes}
assert {top for top in tops if not top.endswith(".dist-info")} == packages, tops ^ packages
assert {f"{package}/py.typed" for package in packages} <= sizes.keys(), "a package without py.typed"
assert any(name.endswith(".dist-info/licenses/LICENSE") for name in sizes), "no licence"
assert {
    "rlzoo/configs/dapo.yaml",
    "rlzoo/configs/paper/qwen3-1.7b.yaml",
    "rlzoo/models/assets/embedded/model.safetensors",
} <= sizes.keys()
ours = {"rlzoo" / path.relative_to(ROOT / "rlzoo") for path in (ROOT / "rlzoo").rglob("*.py")}
ours |= {path.relative_to(ROOT / "plugins") for path in (ROOT / "plugins").rglob("*.py")}
assert {str(path) for path in ours} == {name for name in sizes if name.endswith(".py")}, "other modules than the checkout's"

with tarfile.open(sdist) as archive:
    members = {member.name.partition("/")[2]: member.size for member in archive.getmembers() if member.isfile()}
assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests/test_docs.py", "configs/dapo.yaml"} <= members.keys()
for name, size in (sizes | members).items():
    parts = Path(name).parts
    assert not {"__pycache__", "runs", "mlruns", ".nox", ".git", ".venv", ".hypothesis"} & set(parts), name
    assert not name.endswith((".pyc", ".db", ".log", ".pt", ".bin")), name
    assert size <= LARGEST, f"{name}: {size} bytes"
for file, content in ((wheel, sizes), (sdist, members)):
    print(f"{file.name}: {len(content)} files, {sum(content.values()):,} bytes")
