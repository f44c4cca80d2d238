"""Files and folders that are written under a temporary name first, so that they are either complete or not there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

UNFINISHED_TENSORS = re.compile(r"\.tmp\w{6}")
"""What safetensors calls a file while it writes it."""


def temporary_path(path: Path, key: str) -> Path:
    """The name under which a file or folder is written before it gets its own.

    Args:
        path: its own name.
        key: a random name that only the writer knows of, such as the identity of a run. A file with another key, or with
            none, belongs to somebody else.
    """
    return path.with_name(f".{path.name}.{key[:16]}.part")


@contextmanager
def replacing(file: Path, key: str) -> Iterator[Path]:
    """Give the block a temporary name to write to, which becomes the file's own at its end."""
    yield temporary_path(file, key)
    temporary_path(file, key).replace(file)


def write_text(file: Path, text: str, key: str) -> None:
    """Write a file that is either the old or the new one, whatever happens; on the disk before this returns."""
    with replacing(file, key) as temporary:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
    sync(file.parent)


def write_tensors(file: Path, tensors: Mapping[str, Tensor], key: str, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file that is either complete or not there.

    It is written in a folder of its own, because safetensors gives unfinished files a random name.
    """
    from safetensors.torch import save_file

    folder = temporary_path(file, key)
    folder.mkdir(exist_ok=True)
    try:
        save_file(dict(tensors), folder / file.name, None if metadata is None else dict(metadata))
        (folder / file.name).replace(file)
    finally:
        remove_files(folder, lambda name: is_tensors(name, file.name))


def is_tensors(name: str, own: str) -> bool:
    """Whether a name in the folder of `write_tensors` is that of its file, or of the unfinished one."""
    return name == own or UNFINISHED_TENSORS.fullmatch(name) is not None


def remove_files(folder: Path, is_own: Callable[[str], object]) -> None:
    """Remove some of the files in a folder, and the folders that are empty then.

    Args:
        folder: links in it are neither followed nor removed.
        is_own: whether a file is to be removed, by its name below the folder, such as ``"state/state.json"``.
    """
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in names):
            if path.is_file() and not path.is_symlink() and is_own(path.relative_to(folder).as_posix()):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # it holds another file
            Path(parent).rmdir()


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
