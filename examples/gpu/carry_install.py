"""Checks and joins the pieces next to this file, and installs their contents without network access; needs only Python and pip.

    python carried/install.py [--to FOLDER]

FOLDER (default: the current one) will contain ``rlzoo`` (the checkout), ``models``, and ``gpu-environment``, an environment on
top of the packages of the Python that runs this script. Installed packages are neither changed nor removed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import site
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def join(manifest: dict[str, Any], to: Path) -> None:
    """Check every piece, join them, and unpack what they contain."""
    whole = to / "carried.tar"
    with whole.open("wb") as file:
        for piece in manifest["pieces"]:
            data = (HERE / piece["name"]).read_bytes() if (HERE / piece["name"]).exists() else b""
            found = hashlib.sha256(data).hexdigest()
            if found != piece["sha256"]:
                whole.unlink()
                sys.exit(f"{piece['name']}: SHA-256 is {found}, not {piece['sha256']}; copy this piece again")
            file.write(data)
    with tarfile.open(whole) as archive:
        unpack(archive, to)
    whole.unlink()


def unpack(archive: tarfile.TarFile, to: Path) -> None:
    """Unpack files and folders; any member that could write outside ``to``, such as a link, ends the installation."""
    for member in archive.getmembers():
        parts = Path(member.name).parts
        if not (member.isfile() or member.isdir()) or ".." in parts or Path(member.name).is_absolute():
            sys.exit(f"{member.name}: expected a file or a folder with a relative path; pack again")
    # Python 3.11.4 and newer can warn if no filter is passed, and older versions do not accept a filter
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(to, **options)


def make_environment(folder: Path) -> str:
    """Create an environment that includes the packages of this Python, and return the path of the environment's Python."""
    # without --system-site-packages, because this Python may itself be in an environment; without pip, which would add
    # setuptools
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    own_user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    known = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages(), *own_user}
    own = next(iter(folder.glob("lib/python*/site-packages")))
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(known) if Path(path).is_dir()]
    (own / "installed-before.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return python


def main() -> None:
    """Check, join and install the pieces."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path())
    to = parser.parse_args().to.resolve()
    to.mkdir(parents=True, exist_ok=True)
    manifest = json.loads((HERE / "manifest.json").read_text(encoding="utf-8"))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    if here != manifest["python"]:
        sys.exit(f"this is Python {here}, but the wheels are for {manifest['python']}; pack again with --python {here}")
    join(manifest, to)
    python = make_environment(to / "gpu-environment")
    # without the user's settings, which may name an index; without dependencies, which were resolved when packing
    pip = [python, "-m", "pip", "--isolated", "install", "--no-index", "--find-links", str(to / "wheels"), "--no-deps"]
    subprocess.run([*pip, *manifest["install"]], check=True)
    subprocess.run([python, "-c", "import rlzoo; print('rlzoo', rlzoo.__file__)"], check=True, cwd=to / "wheels")
    print(f"cd {to / 'rlzoo'} && {python} -m examples.gpu")


if __name__ == "__main__":
    main()
