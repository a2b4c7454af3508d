"""Tuned configurations on disk: whatever a file holds, and whatever happens while it is written."""

import errno
import fcntl
import json
import os
import random
import signal
import stat
import time
import warnings

import hypothesis
import pytest
from hypothesis import strategies as st
from tuned import MACHINE, SMALL, WIDE, entry, key

from tritonfp8.tuning import store
from tritonfp8.tuning.kinds import find
from tritonfp8.tuning.matmul_space import SPACES
from tritonfp8.tuning.store import dump, parse, read_shipped, read_user, save

ENTRIES = {key(): entry(), key(m=8192): entry(SMALL, 20.5), key(n=7, bare=False): entry("a later version's")}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_warned", set())
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    return tmp_path


@pytest.fixture
def folder(home):
    return home / "cache" / "tritonfp8"


@pytest.fixture
def path(folder):
    return folder / f"{MACHINE}.json"


def quietly(function, *args):
    """The result, where nothing may be warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args)


def warned_once(*functions):
    """The results, where all together must warn once."""
    with pytest.warns(UserWarning, match="tuned configurations") as caught:
        results = [function() for function in functions]
    assert len(caught) == 1, [str(each.message) for each in caught]
    return *results, str(caught[0].message)


def raising(error):
    """A function that raises the error, whatever it is called with."""

    def fail(*args, **options):
        raise error

    return fail


def miss(message):
    """Reading, twice, is a miss with one warning."""
    first, second, warning = warned_once(lambda: read_user(MACHINE), lambda: read_user(MACHINE))
    assert first == second == {}
    assert message in warning


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
ROW = json.loads(dump({key(): entry()}, MACHINE))["entries"][0]
ROWS = st.builds(lambda changes: {**ROW, **changes}, st.dictionaries(st.sampled_from(list(ROW)), VALUES, max_size=2))
DOCUMENTS = st.fixed_dictionaries(
    {"format": st.just(1) | VALUES, "machine": st.just(MACHINE) | VALUES, "entries": st.lists(ROWS | VALUES) | VALUES}
)


class TestContents:
    def test_they_are_json_in_a_fixed_order_and_are_read_back(self):
        data = dump(ENTRIES, MACHINE)
        assert parse(data, MACHINE) == (ENTRIES, 1)
        assert data == dump(dict(reversed(ENTRIES.items())), MACHINE)
        document = json.loads(data)
        assert document["machine"] == MACHINE
        assert document["entries"][1] == {
            "family": "epilogue", "accumulation": "precise", "a_rows": 0, "b_rows": 0, "out_itemsize": 2, "bare": True,
            "copy_engine": True, "n": 4096, "k": 4096, "m": 4096, "config": WIDE, "microseconds": 10.0,
            "triton": "3.6.0", "tritonfp8": "0.1.0",
        }  # fmt: skip

    @pytest.mark.parametrize(
        "change",
        [
            {"microseconds": float("nan")}, {"microseconds": float("inf")}, {"microseconds": 0}, {"microseconds": "1"},
            {"microseconds": 10**400}, {"microseconds": True}, {"n": -1}, {"n": 0}, {"m": 2**41}, {"k": 4096.0},
            {"m": True}, {"bare": 1}, {"config": None}, {"config": ""}, {"config": "x" * 300}, {"triton": 3},
            {"config": {"block_m": 128, "ir_override": "/x"}}, {"ir_override": "/x"},
        ],
    )  # fmt: skip
    def test_a_malformed_entry_is_one_miss(self, path, change):
        save(ENTRIES, MACHINE)
        document = json.loads(path.read_text())
        row = document["entries"][1]
        path.write_text(json.dumps({**document, "entries": [document["entries"][0], {**row, **change}, 7, None]}))
        with pytest.warns(UserWarning, match="4 entries of .* are malformed or name") as caught:
            assert read_user(MACHINE) == {key(n=7, bare=False): ENTRIES[key(n=7, bare=False)]}
        assert len(caught) == 1

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "no JSON"), (b"\xff\xfe\x00", "no JSON"), (b"[" * 200_000, "no JSON"), (b"1" * 5000, "no JSON"),
            (dump(ENTRIES, MACHINE)[:-9], "no JSON"),
            (b"[]", "no list of entries"), (b'{"entries": {}}', "no list of entries"),
            (b'{"format": 2, "machine": "nvidia-h200-sm90-132", "entries": []}', "not of format 1"),
            (b'{"format": 1, "machine": "other", "entries": []}', "not of format 1"),
            (b" " * (store.MAX_BYTES + 1), "larger than"),
        ],
        ids=lambda given: given[:30].decode("latin") if isinstance(given, bytes) else given,
    )  # fmt: skip
    def test_an_unusable_file_is_a_miss_and_kept_aside(self, path, folder, data, message):
        save(ENTRIES, MACHINE)
        path.write_bytes(data)
        miss(message)
        assert quietly(save, {key(m=64): entry()}, MACHINE)
        assert quietly(read_user, MACHINE) == {key(m=64): entry()}
        assert (folder / f"{MACHINE}.json.unusable").read_bytes() == data

    @hypothesis.given(data=st.binary(max_size=60) | (DOCUMENTS | VALUES).map(lambda value: json.dumps(value).encode()))
    @hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture], max_examples=150)
    def test_any_contents_cost_at_most_a_warning(self, folder, path, monkeypatch, data):
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        store._warned.clear()
        folder.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        new = {key(m=96): entry(SMALL)}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = read_user(MACHINE)
            assert save(new, MACHINE)
            assert read_user(MACHINE) == {**before, **new}
        assert len(caught) <= 1
        for at, found in before.items():
            assert type(at.m) is int
            assert 0 < found.microseconds < float("inf")


class TestPlaces:
    def test_nothing_there_is_nothing_tuned(self, folder):
        assert quietly(read_user, MACHINE) == quietly(read_shipped, MACHINE) == {}
        assert not folder.exists()

    @pytest.mark.parametrize("is_there", [True, False])
    def test_only_the_user_gets_in(self, folder, path, is_there):
        if is_there:
            folder.mkdir(parents=True, mode=0o755)
        assert quietly(save, ENTRIES, MACHINE)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert sorted(each.name for each in folder.iterdir()) == [path.name, f"{path.name}.lock"]

    def test_the_default_is_below_home(self, monkeypatch, home):
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.delenv("XDG_CACHE_HOME")
        for given in (None, "", "relative/path"):
            if given is not None:
                monkeypatch.setenv("XDG_CACHE_HOME", given)
            assert store.user_folder() == home / ".cache" / "tritonfp8"

    def test_without_a_home_nothing_is_kept(self, monkeypatch):
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(store.Path, "home", raising(RuntimeError("none")))
        found, saved, _ = warned_once(lambda: read_user(MACHINE), lambda: save(ENTRIES, MACHINE))
        assert (found, saved) == ({}, False)

    @pytest.mark.parametrize("target", ["file", "folder"])
    def test_links_are_not_followed(self, home, folder, path, target):
        save(ENTRIES, MACHINE)
        linked, elsewhere = path if target == "file" else folder, home / "elsewhere"
        linked.rename(elsewhere)
        linked.symlink_to(elsewhere)
        written = elsewhere if target == "file" else elsewhere / path.name
        before = written.read_bytes()
        miss("link")
        assert not quietly(save, {key(m=64): entry()}, MACHINE)
        assert linked.is_symlink()
        assert written.read_bytes() == before

    def test_what_belongs_to_another_user_is_not_read(self, monkeypatch):
        save(ENTRIES, MACHINE)
        mine = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
        miss("belongs to another user")
        assert not quietly(save, ENTRIES, MACHINE)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
    def test_a_file_of_another_user_in_a_folder_of_ones_own(self, path):
        save(ENTRIES, MACHINE)
        os.chown(path, 12345, -1)
        miss("belongs to another user")

    @pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
    def test_other_than_a_regular_file(self, folder, path, make):
        folder.mkdir(parents=True)
        make(path)
        begin = time.monotonic()
        miss("")
        assert not quietly(save, ENTRIES, MACHINE)
        assert time.monotonic() - begin < 5

    def test_a_file_in_place_of_the_folder(self, folder):
        folder.parent.mkdir()
        folder.write_text("")
        miss("folder")
        assert not quietly(save, ENTRIES, MACHINE)

    def test_unreadable(self, path, monkeypatch):
        save(ENTRIES, MACHINE)
        real = os.open

        def refuse(name, *args, **options):
            if name == path.name:
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(name, *args, **options)

        monkeypatch.setattr(os, "open", refuse)
        miss("Permission denied")

    def test_the_shipped_file_is_read_through_links_and_a_broken_one_is_a_miss(self, home):
        (home / "real").write_bytes(dump({key(): entry()}, MACHINE))
        store.SHIPPED.mkdir()
        (store.SHIPPED / f"{MACHINE}.json").symlink_to(home / "real")
        assert quietly(read_shipped, MACHINE) == {key(): entry()}
        (home / "real").write_text("{")
        assert warned_once(lambda: read_shipped(MACHINE), lambda: read_shipped(MACHINE))[:2] == ({}, {})


class TestWriting:
    def test_entries_add_up_and_the_latest_counts(self):
        assert save({key(): entry(SMALL), key(m=64): entry()}, MACHINE)
        assert save({key(): entry(WIDE)}, MACHINE)
        assert read_user(MACHINE) == {key(): entry(WIDE), key(m=64): entry()}

    @pytest.mark.parametrize("where", ["mkdir", "open"])
    def test_a_read_only_home_is_one_warning(self, home, monkeypatch, where):
        if where == "open":
            save({}, MACHINE)
        refuse = raising(OSError(errno.EROFS, "Read-only file system"))
        monkeypatch.setattr(store.Path if where == "mkdir" else store.os, where, refuse)
        first, second, warning = warned_once(lambda: save(ENTRIES, MACHINE), lambda: save(ENTRIES, MACHINE))
        assert (first, second) == (False, False)
        assert "Read-only file system" in warning

    def test_a_full_disk_leaves_what_was_there(self, folder, monkeypatch):
        save({key(): entry()}, MACHINE)
        monkeypatch.setattr(os, "fsync", raising(OSError(errno.ENOSPC, "No space left on device")))
        saved, warning = warned_once(lambda: save(ENTRIES, MACHINE))
        assert not saved
        assert "No space left" in warning
        assert quietly(read_user, MACHINE) == {key(): entry()}
        assert not list(folder.glob(".*"))

    def test_a_lock_that_is_held_is_not_waited_for_forever(self, path, monkeypatch):
        save({key(): entry()}, MACHINE)
        monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
        with open(f"{path}.lock") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            saved, warning = warned_once(lambda: save(ENTRIES, MACHINE))
            assert not saved
            assert "lock" in warning
            assert quietly(read_user, MACHINE) == {key(): entry()}
        assert save(ENTRIES, MACHINE)

    def test_a_file_system_without_locks(self, monkeypatch):
        monkeypatch.setattr(fcntl, "flock", raising(OSError(errno.ENOLCK, "No locks available")))
        assert quietly(save, {key(): entry()}, MACHINE)
        assert quietly(save, {key(m=64): entry()}, MACHINE)
        assert set(read_user(MACHINE)) == {key(), key(m=64)}


def forked(function):
    """Run ``function(report)`` in a child; returns its pid and a pipe of the numbers that it reports."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        function(lambda number: os.write(writing, number.to_bytes(4, "little")))
        status = 0
    finally:
        os._exit(status)


def reported(pid, reading):
    """What a child reported until it ended, and how it ended."""
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    return [int.from_bytes(data[i : i + 4], "little") for i in range(0, len(data) - 3, 4)], status


def numbered(i):
    return key(m=16 * (i + 1)), entry(microseconds=i + 1.0)


def test_eight_writers_at_once_lose_nothing():
    def write(process):
        def run(report):
            for i in range(process * 10, process * 10 + 10):
                at, found = numbered(i)
                if save({at: found}, MACHINE):
                    report(i)

        return run

    children = [forked(write(process)) for process in range(8)]
    outcomes = [reported(*child) for child in children]
    assert [status for _, status in outcomes] == [0] * 8
    assert sorted(i for done, _ in outcomes for i in done) == list(range(80))
    assert quietly(read_user, MACHINE) == dict(map(numbered, range(80)))


def test_killed_writers_lose_nothing_that_was_finished(folder):
    """The child is killed at random moments, again and again; a reader never finds a broken file."""
    moments = random.Random(0)
    finished, first = set(), 0

    def run(report):
        for i in range(first, first + 10_000):
            at, found = numbered(i)
            if save({at: found}, MACHINE):
                report(i)

    for _ in range(25):
        pid, reading = forked(run)
        finished.add(int.from_bytes(os.read(reading, 4), "little"))
        time.sleep(moments.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        done, status = reported(pid, reading)
        assert os.WTERMSIG(status) == signal.SIGKILL
        finished |= set(done)
        first += 100
        present = quietly(read_user, MACHINE)
        assert present.items() >= {numbered(i) for i in finished}
    assert len(finished) >= 25
    # What the killed left behind goes with the next write.
    assert save(dict([numbered(0)]), MACHINE)
    assert not list(folder.glob(".*"))


def test_what_is_shipped_names_configurations_of_this_version():
    """Those measured, by the versions that measured them."""
    folder = store.Path(store.__file__).parent / "tuned"
    files = list(folder.iterdir())
    assert folder / f"{MACHINE}.json" in files
    for file in files:
        entries, misses = parse(file.read_bytes(), file.stem)
        assert misses == 0
        assert file.read_bytes() == dump(entries, file.stem)
        for at, found in entries.items():
            assert at.kind.family in SPACES
            assert find(at.kind, found.config) is not None
