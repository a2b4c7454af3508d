"""Text to train on, as bytes: the standard library of the running Python, or a file or folder of text.

A byte is a token (vocabulary 256): no tokenizer has to be downloaded, and a token count is a byte count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

VOCABULARY = 256
MAX_BYTES = 1 << 30
# One block in so many is held out. Blocks, and not the end of the text, so that it is like the text that is trained on.
HELD_OUT_EVERY = 20
BLOCK_BYTES = 1 << 16
LIBRARY_SUFFIXES = frozenset({".py", ".pyi", ".txt", ".rst", ".md", ".html"})
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
_SNIFFED_BYTES = 8192


@dataclass(frozen=True)
class Corpus:
    """Text as one sequence of bytes: the files, sorted by path and concatenated.

    Attributes:
        data: uint8 ``[bytes]``, on the CPU: the text to train on.
        source: description of its origin.
        files: number of files read.
        skipped: number of files left out because they are not text or cannot be read.
        truncated: whether reading stopped at :data:`MAX_BYTES`.
        sha256: SHA-256 of the whole text, in hex.
        held_out: uint8 ``[bytes]``, on the CPU: the text that is not trained on; empty until :func:`hold_out`.
    """

    data: torch.Tensor
    source: str
    files: int
    skipped: int
    truncated: bool
    sha256: str
    held_out: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))

    def __str__(self) -> str:
        size = self.data.numel() + self.held_out.numel()
        text = f"{size / 1e6:.1f} MB of text in {self.files} files from {self.source}"
        notes = [f"{self.skipped} files that are not text or not readable left out"] if self.skipped else []
        notes += [f"stopped at {MAX_BYTES} bytes"] if self.truncated else []
        return text + (f" ({'; '.join(notes)})" if notes else "")


def load(path: str | Path | None = None) -> Corpus:
    """Read the text of a file, of all text files below a folder, or (None) of Python's standard library.

    A file given by its path is read without checks. In a folder, hidden files and folders are left out; files with a
    NUL byte near their start (binaries) are left out and counted; links to folders are not followed. At most
    :data:`MAX_BYTES` are read.

    Raises:
        ValueError: the path does not exist, is neither file nor folder, cannot be read, or has no text.
    """
    if path is None:
        return standard_library()
    path = Path(path)
    if path.is_dir():
        return _read(sorted(_files(path)), source=str(path))
    if path.is_file():
        try:
            path.open("rb").close()
        except OSError as error:
            raise ValueError(f"the data file {path} cannot be read: {error.strerror}") from error
        return _read([path], source=str(path), sniff=False)
    what = "is neither a file nor a folder" if path.exists() else "does not exist"
    raise ValueError(f"the data {path} {what}; give a text file or a folder of text files")


def standard_library() -> Corpus:
    """Source and documentation of the running Python's standard library: tens of MB, without installed packages.

    Raises:
        ValueError: this Python's library is not in files (it is frozen or zipped); give other data.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(_files(root, lambda name: Path(name).suffix in LIBRARY_SUFFIXES))
    return _read(paths, f"the standard library of Python {platform.python_version()}")


def batches(corpus: Corpus, *, steps: int, batch_size: int, seq_len: int, seed: int) -> Iterator[torch.Tensor]:
    """``steps`` batches of windows at random places, uint8 ``[batch_size, seq_len + 1]``, reproducible by ``seed``.

    A window has one byte more than ``seq_len``: input ``[:, :-1]`` and target ``[:, 1:]`` both have ``seq_len``.

    Raises:
        ValueError: the corpus is shorter than one window.
    """
    places = corpus.data.numel() - seq_len
    if places < 1:
        raise ValueError(
            f"a window of seq_len {seq_len} needs at least {seq_len + 1} bytes of text; {corpus.source} has "
            f"{corpus.data.numel()}. Use a shorter sequence or more data."
        )
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(seq_len + 1)
    for _ in range(steps):
        starts = torch.randint(places, (batch_size, 1), generator=generator)
        yield corpus.data[starts + window]


def hold_out(corpus: Corpus, seq_len: int) -> Corpus:
    """The corpus with one block in :data:`HELD_OUT_EVERY` moved from ``data`` to ``held_out``.

    A loss on text that was trained on several times also measures how much of it the model knows by heart. A loss on
    held-out text does not. Nothing is moved if a block would be shorter than a window of ``seq_len`` + 1 bytes.
    """
    size = min(BLOCK_BYTES, corpus.data.numel() // HELD_OUT_EVERY)
    if size <= seq_len:
        return corpus
    blocks = corpus.data.split(size)
    moved = range(HELD_OUT_EVERY // 2, len(blocks), HELD_OUT_EVERY)
    kept = [block for index, block in enumerate(blocks) if index not in moved]
    return dataclasses.replace(corpus, data=torch.cat(kept), held_out=torch.cat([blocks[index] for index in moved]))


def windows(text: torch.Tensor, *, count: int, batch_size: int, seq_len: int) -> Iterator[torch.Tensor]:
    """At most ``count`` windows, evenly spread over ``text`` without overlap, in batches of at most ``batch_size``.

    A batch is uint8 ``[windows, seq_len + 1]``.
    """
    whole = text[: text.numel() // (seq_len + 1) * (seq_len + 1)].view(-1, seq_len + 1)
    count = min(count, len(whole))
    if count:
        yield from whole[torch.arange(count) * len(whole) // count].split(batch_size)


def _files(root: Path, wanted: Callable[[str], bool] = bool) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if wanted(name) and not name.startswith("."))


def _read(paths: list[Path], source: str, sniff: bool = True) -> Corpus:
    data = bytearray()
    files = skipped = 0
    for path in paths:
        if len(data) >= MAX_BYTES:
            break
        text = _text(path, MAX_BYTES - len(data), sniff)
        if text is None:
            skipped += 1
        else:
            files += 1
            data += text
    if not data:
        raise ValueError(f"{source} has no text ({skipped} files that are not text or not readable); give other data")
    truncated = len(data) >= MAX_BYTES
    digest = hashlib.sha256(data).hexdigest()
    return Corpus(torch.frombuffer(data, dtype=torch.uint8), source, files, skipped, truncated, digest)


def _text(path: Path, limit: int, sniff: bool) -> bytes | None:
    # Regular files only: opening a named pipe would block for ever.
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            # A binary can have gigabytes. So it is left out by its start, before the rest is read.
            text = file.read(min(limit, _SNIFFED_BYTES))
            return None if sniff and b"\0" in text else text + file.read(limit - len(text))
    except OSError:
        return None
