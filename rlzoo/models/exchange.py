"""Exchanges files between the main rank and the other ranks if they do not share a file system."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlzoo.models.processes import Item, gather

if TYPE_CHECKING:
    from accelerate import Accelerator


def collect(accelerator: Accelerator, folder: Path) -> None:
    """Move the files in the other ranks' copies of a folder to the main rank's copy, one rank at a time.

    Nothing happens if all ranks share the folder. Every rank needs enough memory for one rank's files.
    """
    accelerator.wait_for_everyone()
    names = gather(accelerator, [_files(folder)])
    there = set(names[0])
    for rank, own in enumerate(names):
        missing = sorted(own - there)
        there |= own
        if missing:
            is_sender = accelerator.process_index == rank
            contents = {name: (folder / name).read_bytes() for name in missing} if is_sender else {}
            for name in contents:  # remove before writing, in case a shared folder was listed too early
                (folder / name).unlink()
            contents = _from_rank(rank, contents)
            _write(folder, contents if accelerator.is_main_process else {})
    accelerator.wait_for_everyone()
    if names[accelerator.process_index] != names[0]:
        for path in [*sorted(folder.rglob("*"), reverse=True), folder, *folder.parents[:3]]:
            with suppress(OSError):  # the folder may not be empty
                path.rmdir()


@contextmanager
def distributed(accelerator: Accelerator, folder: Path, key: str) -> Iterator[Path]:
    """Yield a folder with the content that ``folder`` has on the main rank.

    Args:
        accelerator: connects the ranks.
        folder: a folder that the main rank has.
        key: name of a file in the folder whose content is different in every folder, so that it shows which ranks share one.
    """
    keys = gather(accelerator, [(folder / key).read_bytes() if (folder / key).is_file() else b""])
    lacks = keys[accelerator.process_index] != keys[0]
    with tempfile.TemporaryDirectory(prefix="rlzoo-received-") as received:
        if any(other != keys[0] for other in keys):
            for name in _from_rank(0, sorted(_files(folder))):
                content = _from_rank(0, (folder / name).read_bytes() if accelerator.is_main_process else b"")
                _write(Path(received), {name: content} if lacks else {})
        yield Path(received) if lacks else folder


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def _write(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def _from_rank(rank: int, item: Item) -> Item:
    """Send an item from one rank to all."""
    from accelerate.utils import broadcast_object_list

    items: list[Item] = broadcast_object_list([item], from_process=rank)
    return items[0]
