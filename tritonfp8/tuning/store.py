"""Tuned configurations on disk: one JSON file a machine, in the user's cache folder or shipped with the package.

A file holds names of configurations and never configurations: it can only name one that this version has. Files are
not trusted: an unusable file counts as empty, with one warning a process, and never raises. A write takes a lock,
merges with the file and replaces it in one step. So no writer loses another's entries, and a reader sees a whole file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tritonfp8.tuning.kinds import SINGLE, Key, Kind, find

FORMAT = 1
MAX_BYTES = 2**23
MAX_TEXT = 200
MAX_NUMBER = 2**40
LOCK_SECONDS = 10.0
_LOCK_POLL_SECONDS = 0.01
_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_OURS = os.O_NOFOLLOW | os.O_CLOEXEC

SHIPPED = Path(__file__).resolve().parent / "tuned"


@dataclass(frozen=True)
class Entry:
    """The measured configuration of a GEMM.

    Attributes:
        config: name of the fastest configuration.
        microseconds: its median time.
        triton, tritonfp8: the versions it was measured with.
    """

    config: str
    microseconds: float
    triton: str
    tritonfp8: str


Entries = dict[Key, Entry]


class UnusableError(Exception):
    """The reason why a file or folder is not used. Only :func:`parse` raises it to callers of this module."""


_FIELDS: Mapping[str, type] = {
    "family": str, "accumulation": str, "a_rows": int, "b_rows": int, "out_itemsize": int, "bare": bool,
    "copy_engine": bool, "groups": str, "n": int, "k": int, "m": int, "experts": int,
    "config": str, "microseconds": float, "triton": str, "tritonfp8": str,
}  # fmt: skip
# Fields of a GEMM of groups, which the rows of other GEMMs leave out.
_OF_GROUPS: Mapping[str, object] = {"groups": SINGLE, "experts": 0}


def _is_valid(value: object, expected: type) -> bool:
    # By type() and not isinstance(): a bool is not a number here.
    if expected is float and type(value) in (int, float):
        return 0 < value <= MAX_NUMBER  # type: ignore[operator]
    if type(value) is not expected:
        return False
    if isinstance(value, str):
        return 0 < len(value) <= MAX_TEXT
    return isinstance(value, int) and 0 <= value <= MAX_NUMBER


def _entry(row: object) -> tuple[Key, Entry] | None:
    if not isinstance(row, dict):
        return None
    row = {**_OF_GROUPS, **row}
    if row.keys() != _FIELDS.keys():
        return None
    if not all(_is_valid(row[name], expected) for name, expected in _FIELDS.items()):
        return None
    if not (row["m"] and row["n"] and row["k"]) or (row["groups"] == SINGLE) != (row["experts"] == 0):
        return None
    kind = Kind(*(row[name] for name in Kind._fields))
    measured = {name: row[name] for name in Entry.__dataclass_fields__}
    return Key(kind, row["n"], row["k"], row["m"], row["experts"]), Entry(**measured)


def parse(data: bytes, machine: str) -> tuple[Entries, int]:
    """The entries of a file's contents, and how many of them are malformed or name nothing that this version has.

    The latter are among the entries: a later version may have written them, and a merge must keep them.

    Raises:
        UnusableError: no JSON of this format and machine.
    """
    if len(data) > MAX_BYTES:
        raise UnusableError(f"it is larger than {MAX_BYTES} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UnusableError(f"it is no JSON ({type(error).__name__})") from error
    if not isinstance(document, dict) or not isinstance(document.get("entries"), list):
        raise UnusableError("it has no list of entries")
    if (document.get("format"), document.get("machine")) != (FORMAT, machine):
        raise UnusableError(f"it is not of format {FORMAT} for {machine}")
    rows = [_entry(row) for row in document["entries"]]
    entries = dict(row for row in rows if row is not None)
    unknown = sum(find(key.kind, entry.config) is None for key, entry in entries.items())
    return entries, rows.count(None) + unknown


def dump(entries: Mapping[Key, Entry], machine: str) -> bytes:
    """The contents of a file: JSON, an entry a line, in the order of the keys."""
    lines = []
    for key, entry in sorted(entries.items(), key=lambda item: item[0]):
        kind, n, k, m, experts = key
        row = {**kind._asdict(), "n": n, "k": k, "m": m, "experts": experts, **asdict(entry)}
        lines.append(json.dumps({name: value for name, value in row.items() if value != _OF_GROUPS.get(name)}))
    head = f'{{"format": {FORMAT}, "machine": {json.dumps(machine)}, "entries": ['
    return (head + ",".join("\n" + line for line in lines) + "\n]}\n").encode()


def user_folder() -> Path:
    """The folder of this user's tuned configurations: ``tritonfp8`` in ``$XDG_CACHE_HOME``, by default in ``~/.cache``.

    Raises:
        UnusableError: no home folder can be found.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):
        return Path(given) / "tritonfp8"
    try:
        return Path.home() / ".cache" / "tritonfp8"
    except RuntimeError as error:
        raise UnusableError("there is no home folder") from error


_warned: set[str] = set()
_warned_lock = threading.Lock()


def _warn(place: str, message: str) -> None:
    """Warn about a file, once a process."""
    with _warned_lock:
        if place in _warned:
            return
        _warned.add(place)
    warnings.warn(message, stacklevel=3)


def _place(machine: str) -> str:
    try:
        return str(user_folder() / _file_name(machine))
    except UnusableError:
        return _file_name(machine)


def _file_name(machine: str) -> str:
    return f"{machine}.json"


def _reason(error: Exception) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)


@contextlib.contextmanager
def _folder(create: bool) -> Iterator[int]:
    """The user's folder as a file descriptor, so that a folder put in its place later is not followed."""
    folder = user_folder()
    if create:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _OURS)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnusableError("its folder is a link or no folder") from error
        raise
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise UnusableError("its folder belongs to another user")
        if create and stat.S_IMODE(status.st_mode) != 0o700:
            os.fchmod(descriptor, 0o700)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(folder: int, name: str) -> bytes:
    """The bytes of a file of the user's own.

    Raises:
        OSError: FileNotFoundError among them.
        UnusableError: it is a link, no regular file, or another user's.
    """
    try:
        # Opening a pipe must not wait for its writer.
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _OURS, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UnusableError("it is a link") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableError("it is no regular file")
        if status.st_uid != os.geteuid():
            raise UnusableError("it belongs to another user")
        return file.read(MAX_BYTES + 1)


def _warn_of_misses(place: str, misses: int) -> None:
    if misses:
        _warn(place, f"{misses} entries of {place} are malformed or name configurations this version does not have")


def _warn_of_file(place: str, error: Exception) -> None:
    _warn(place, f"the tuned configurations in {place} are not used: {_reason(error)}")


def read_user(machine: str) -> Entries:
    """This user's entries for a machine; empty, with one warning, if the file cannot be used."""
    try:
        with _folder(create=False) as folder:
            entries, misses = parse(_read(folder, _file_name(machine)), machine)
    except FileNotFoundError:
        return {}
    except (OSError, UnusableError) as error:
        _warn_of_file(_place(machine), error)
        return {}
    _warn_of_misses(_place(machine), misses)
    return entries


def read_shipped(machine: str) -> Entries:
    """The shipped entries for a machine. They are trusted like the package's code: links are followed."""
    path = SHIPPED / _file_name(machine)
    try:
        entries, misses = parse(path.read_bytes(), machine)
    except FileNotFoundError:
        return {}
    except (OSError, UnusableError) as error:
        _warn_of_file(str(path), error)
        return {}
    _warn_of_misses(str(path), misses)
    return entries


def save(entries: Mapping[Key, Entry], machine: str) -> bool:
    """Add ``entries`` to this user's file for ``machine``, in place of entries with the same keys.

    Returns:
        Whether they are on the disk. Where they cannot be, a warning says so, once.
    """
    name = _file_name(machine)
    try:
        with _folder(create=True) as folder, _locked(folder, name) as alone:
            if alone:
                _remove_unfinished(folder, name)
            _replace(folder, name, dump({**_present(folder, name, machine), **entries}, machine))
    except (OSError, UnusableError) as error:
        place = _place(machine)
        _warn(place, f"tuned configurations last only as long as this process: {place}: {_reason(error)}")
        return False
    return True


def _present(folder: int, name: str, machine: str) -> Entries:
    """The entries that a merge starts from. An unusable file is moved aside, not overwritten."""
    try:
        data = _read(folder, name)
    except FileNotFoundError:
        return {}
    try:
        return parse(data, machine)[0]
    except UnusableError as error:
        _warn_of_file(_place(machine), error)
        os.replace(name, f"{name}.unusable", src_dir_fd=folder, dst_dir_fd=folder)
        return {}


@contextlib.contextmanager
def _locked(folder: int, name: str) -> Iterator[bool]:
    """Keep other writers of ``name`` out; yields whether that was possible: some file systems have no locks.

    Raises:
        UnusableError: another process has held the lock all the time.
    """
    descriptor = os.open(f"{name}.lock", os.O_RDWR | os.O_CREAT | _OURS, 0o600, dir_fd=folder)
    try:
        alone = _lock(descriptor)
        try:
            yield alone
        finally:
            if alone:
                # A child that was forked in between shares the lock: closing the file here would not release it.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise UnusableError(f"another process has held its lock for {LOCK_SECONDS:g} s") from None
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return False
        else:
            return True


def _remove_unfinished(folder: int, name: str) -> None:
    """Remove temporary files of killed writers. Call it under the lock only, when no other writer runs."""
    for other in os.listdir(folder):
        if other.startswith(f".{name}.") and other.endswith(".tmp"):
            with contextlib.suppress(OSError):
                os.unlink(other, dir_fd=folder)


def _replace(folder: int, name: str, data: bytes) -> None:
    temporary = f".{name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OURS, 0o600, dir_fd=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    # Some file systems cannot; the file is whole either way.
    with contextlib.suppress(OSError):
        os.fsync(folder)
