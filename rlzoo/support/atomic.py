"""Writes files and folders under a temporary name first so that each is either complete or absent."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

if TYPE_CHECKING:
    from torch import Tensor


class UnwritableError(OSError):
    """Raised if a file cannot be written. The message is one line with the reason, the file and the free space."""


@contextmanager
def writing(file: Path, size: int = 0) -> Iterator[None]:
    """Inside the block, re-raise errors from writing files as `UnwritableError`.

    Args:
        file: the file or folder that is being written.
        size: approximate number of bytes that are needed; 0 if unknown.
    """
    try:
        yield
    except UnwritableError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "file write failed" not in str(error):  # torch.save has no error class
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        free = shutil.disk_usage(next(path for path in (file, *file.parents) if path.is_dir())).free
        space = f"about {_megabytes(size)} needed, " * (size > 0) + f"{_megabytes(free)} free"
        raise UnwritableError(f"{reason}: {space} ({file})") from error


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


def temporary_path(path: Path, key: str) -> Path:
    """Return the temporary name of a file or folder that is being written.

    Args:
        path: the final name.
        key: a random name that is unique to the writer, such as the ID of a run. Files with another key or without a key
            belong to other writers.
    """
    return path.with_name(f".{path.name}.{key[:16]}.part")


@contextmanager
def replacing(file: Path, key: str) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to ``file`` at the end of the block unless the block fails."""
    temporary = temporary_path(file, key)
    try:
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(file: Path, text: str, key: str) -> None:
    """Replace a text file atomically and wait until it is on disk."""
    with replacing(file, key) as temporary:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
    sync(file.parent)


def write_tensors(file: Path, tensors: Mapping[str, Tensor], key: str, metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically.

    The file is written in a separate folder, because safetensors gives unfinished files random names.
    """
    import safetensors.numpy
    import safetensors.torch

    folder = temporary_path(file, key)
    folder.mkdir(exist_ok=True)
    facts = None if metadata is None else dict(metadata)
    try:
        try:  # use numpy, because safetensors.torch leaves ctypes types in memory for every new size of a tensor
            arrays = {name: tensor.detach().contiguous().numpy() for name, tensor in tensors.items()}
        except TypeError:  # a tensor is bfloat16 or on a GPU
            safetensors.torch.save_file(dict(tensors), folder / file.name, facts)
        else:
            safetensors.numpy.save_file(arrays, folder / file.name, facts)
        follow_umask(folder)
        (folder / file.name).replace(file)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def follow_umask(folder: Path) -> None:
    """Give files below a folder the modes of ordinary files, because safetensors makes them readable only by their owner."""
    mode = folder.stat().st_mode & 0o666  # set by mkdir; a process can read its umask only by changing it for all threads
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def remove_files(folder: Path, is_own: Callable[[str], object]) -> None:
    """Remove selected files below a folder and then any empty folders.

    Args:
        folder: the folder. Links in it are neither followed nor removed.
        is_own: returns whether to remove a file, given its path below the folder, such as ``"state/state.json"``.
    """
    for parent, _, names in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in names):
            if path.is_file() and not path.is_symlink() and is_own(path.relative_to(folder).as_posix()):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder contains other files
            Path(parent).rmdir()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
