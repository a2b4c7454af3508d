"""Files under their final names are whole: written by one process, or by the first of the ranks that share a model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from tritonfp8.conversion import bare, reshard
from tritonfp8.export.files import written_before
from tritonfp8.export.places import places
from tritonfp8.layers.linear import is_distributed
from tritonfp8.specs.naming import listed

T = TypeVar("T")
Write = Callable[[Path], None]
"""Writes the content of a file to a path."""


def attempt(make: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What a function makes, or its error, which is told in the next step of all ranks."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def settled(
    groups: Sequence[dist.ProcessGroup], error: Exception | None, mine: Any, stopped: Callable[[str], Exception]
) -> list[Any]:
    """What each rank hands in, after all of them have come here.

    Args:
        groups: of the ranks, one for each dim of their mesh; without one it is this rank.
        error: of this rank.
        mine: what this rank hands in.
        stopped: the exception of a rank without an error, from the texts of the errors of others.

    Raises:
        Exception: ``error``, if there is one.
        Exception: ``stopped(texts)``, if another rank has one.
    """
    rank = dist.get_rank() if groups else 0
    found: list[Any] = [(rank, None if error is None else f"{type(error).__name__}: {error}", mine)]
    for group in groups:
        of_group: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_group, found, group=group)
        found = [each for of_rank in of_group for each in of_rank]
    if error is not None:
        raise error
    if texts := [f"rank {rank}: {text}" for rank, text, _ in found if text is not None]:
        raise stopped("\n".join(texts))
    return [each for _, _, each in found]


def _not_written(texts: str) -> RuntimeError:
    return RuntimeError(f"the checkpoint was not written: {texts}")


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """The ranks that have parts of a model, which write it together: a group for each dim of the largest mesh."""
    reshard(model)
    tensors: list[Any] = [place.tensor for place in places(bare(model)) if is_distributed(place.tensor)]
    meshes = [x.device_mesh for x in tensors]
    return max(meshes, key=lambda mesh: mesh.size()).get_all_groups() if meshes else []


def together(groups: Sequence[dist.ProcessGroup], root: Path, make: Callable[[], T]) -> T:
    """What each rank makes, if none has an error. Raises ValueError for a folder that has weights."""

    def checked() -> T:
        if found := written_before(root):
            raise ValueError(f"{root} must not have weights yet; it has {listed(found)}. Give another folder")
        return make()

    found, error = attempt(checked)
    settled(groups, error, None, _not_written)
    assert found is not None
    return found


def write_files(
    groups: Sequence[dist.ProcessGroup], root: Path, files: Mapping[str, Callable[[bool], Write]], texts: dict[str, str]
) -> dict[str, int]:
    """Write files, and texts after them. A sharded model is written by the first of its ranks, which all call this.

    Args:
        groups: of the ranks; none for a whole model.
        root: the folder.
        files: by name a function that makes the content on all ranks, keeps it if it is told to, and returns what
            writes it.
        texts: by name, the one that tells how to read the tensors last.

    Returns:
        The bytes of all files.
    """
    with ExitStack() as stack:
        is_writer = all(dist.get_rank(group) == 0 for group in groups)
        draft, error = attempt(lambda: stack.enter_context(_temporary(root)) if is_writer else None)
        for name, make in files.items():
            # After an error, too: the other ranks wait for this one in what gathers weights.
            write, failed = attempt(partial(make, is_writer and error is None))
            if draft is not None and write is not None and error is None:
                _, failed = attempt(partial(write, draft / name))
            error = error or failed
        written = None
        if draft is not None and error is None:
            written, error = attempt(partial(_finish, draft, root, list(files), texts))
        found: dict[str, int] = settled(groups, error, written, _not_written)[0]
        return found


@contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    """A folder inside ``root``, which is made, on the same disk: a rename moves no data. It is removed in any case."""
    root.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=".export-", dir=root))
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _finish(draft: Path, root: Path, names: list[str], configs: dict[str, str]) -> dict[str, int]:
    """Write the configs, and give all files their names. Returns their bytes."""
    for name, text in configs.items():
        _write_text(draft / name, text)
    order = [*names, *configs]
    files = {name: (draft / name).stat().st_size for name in order}
    for name in order:
        os.replace(draft / name, root / name)
    _sync(root)
    return files


def taken(tensors: Iterable[tuple[str, Tensor]], keep: bool) -> dict[str, Tensor]:
    """Tensors as safetensors writes them; without ``keep`` they are made, and none is in memory with the next one."""
    return {name: owned(x) for name, x in tensors if keep}


def owned(x: Tensor) -> Tensor:
    """``x`` on the CPU, contiguous, and in memory that it does not share, as safetensors writes it."""
    x = x.cpu().contiguous()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of safetensors."""
    from safetensors.torch import save_file

    # safetensors lets only the user read its files, so an engine of another user could not: take the usual mode.
    path.touch()
    mode = path.stat().st_mode
    # transformers reads a file only if its metadata names the framework.
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    _sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def copy_file(source: Path, path: Path) -> None:
    """Copy a file."""
    shutil.copyfile(source, path)
    _sync(path)


def _sync(path: Path) -> None:
    # A rename may reach the disk before the data, so that a crash of the machine would leave an empty file.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def json_text(data: dict[str, Any]) -> str:
    """The text of a file of JSON."""
    return json.dumps(data, indent=2) + "\n"
