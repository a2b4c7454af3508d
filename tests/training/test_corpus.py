import hashlib
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from tritonfp8.training import corpus


def text_of(found: corpus.Corpus) -> bytes:
    return bytes(found.data.numpy())


@pytest.fixture
def folder(tmp_path):
    files = {
        "b.txt": b"second", "a/z.rst": b"first ", "c/deep/er.py": b" third", "binary.txt": b"\x7fELF\0\0",
        ".hidden": b"hidden", ".git/config.txt": b"hidden", "__pycache__/a.txt": b"cached",
        "lib/site-packages/other.py": b"installed",
    }  # fmt: skip
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    os.mkfifo(tmp_path / "pipe.txt")
    return tmp_path


def test_standard_library_is_megabytes_of_its_own_source_and_documentation():
    found = corpus.load()
    text = text_of(found)
    library = Path(sysconfig.get_paths()["stdlib"])
    assert found.data.dtype == torch.uint8
    assert len(text) > 5_000_000
    assert (library / "os.py").read_bytes() in text
    assert (library / "pydoc_data" / "topics.py").read_bytes() in text
    assert Path(torch.__file__).read_bytes() not in text
    assert found.sha256 == hashlib.sha256(text).hexdigest()
    # It is the same in another process.
    code = "from tritonfp8.training import corpus; print(corpus.load().sha256)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == found.sha256


def test_folder_is_read_in_sorted_order_without_what_is_no_text(folder):
    found = corpus.load(folder)
    assert text_of(found) == b"first second third"
    assert (found.files, found.skipped, found.truncated) == (3, 2, False)
    assert "2 files that are not text or not readable left out" in str(found)
    # A file is taken as it is.
    assert text_of(corpus.load(folder / "binary.txt")) == b"\x7fELF\0\0"


def test_reading_stops_at_the_limit_and_says_so(folder, monkeypatch):
    monkeypatch.setattr(corpus, "MAX_BYTES", 9)
    found = corpus.load(folder)
    assert text_of(found) == b"first sec"
    assert found.truncated
    assert "stopped at 9 bytes" in str(found)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "does not exist; give a text file or a folder"),
        ("pipe.txt", "is neither a file nor a folder"),
        (".git/nothing.txt", "has no text"),
        ("empty", r"has no text \(0 files"),
    ],
)
def test_data_that_cannot_be_used_is_refused_by_name(folder, name, message):
    (folder / "empty").mkdir()
    (folder / ".git/nothing.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=message) as error:
        corpus.load(folder / name)
    assert str(folder / name) in str(error.value)


def of_bytes(count, sha256=""):
    data = (torch.arange(count) % 251).to(torch.uint8)
    return corpus.Corpus(data, "a test", files=1, skipped=0, truncated=False, sha256=sha256)


ALPHABET = of_bytes(100)


def test_batches_are_windows_of_the_text():
    drawn = list(corpus.batches(ALPHABET, steps=5, batch_size=3, seq_len=10, seed=0))
    assert len(drawn) == 5
    for batch in drawn:
        assert batch.shape == (3, 11)
        assert batch.dtype == torch.uint8
        assert torch.equal(batch, batch[:, :1] + torch.arange(11, dtype=torch.uint8))


def test_batches_reach_every_place_and_no_further():
    (batch,) = corpus.batches(ALPHABET, steps=1, batch_size=5000, seq_len=97, seed=0)
    assert batch[:, 0].unique().tolist() == [0, 1, 2]
    (whole,) = corpus.batches(ALPHABET, steps=1, batch_size=1, seq_len=99, seed=0)
    assert torch.equal(whole[0], ALPHABET.data)
    with pytest.raises(ValueError, match="seq_len 100 needs at least 101 bytes of text; a test has 100"):
        next(corpus.batches(ALPHABET, steps=1, batch_size=1, seq_len=100, seed=0))


def test_batches_depend_on_the_seed_alone():
    def draw(seed):
        return torch.stack(list(corpus.batches(ALPHABET, steps=4, batch_size=2, seq_len=10, seed=seed)))

    first = draw(0)
    torch.manual_seed(123)
    assert torch.equal(draw(0), first)
    assert not torch.equal(draw(1), first)


def test_one_block_in_twenty_is_held_out():
    whole = of_bytes(5000, sha256="of all")
    split = corpus.hold_out(whole, seq_len=99)
    # 5000 bytes are 20 blocks of 250. One is held out.
    assert torch.equal(split.held_out, whole.data[2500:2750])
    assert torch.equal(split.data, torch.cat((whole.data[:2500], whole.data[2750:])))
    assert split.sha256 == "of all"
    assert str(split) == str(whole)
    # A block that is shorter than a window is not held out.
    assert corpus.hold_out(ALPHABET, seq_len=4).held_out.numel() == 5
    assert corpus.hold_out(ALPHABET, seq_len=5) is ALPHABET


def test_windows_are_spread_over_the_text_without_overlap():
    drawn = list(corpus.windows(ALPHABET.data, count=5, batch_size=2, seq_len=9))
    assert [len(batch) for batch in drawn] == [2, 2, 1]
    assert torch.cat(drawn)[:, 0].tolist() == [0, 20, 40, 60, 80]
    everything = torch.cat(list(corpus.windows(ALPHABET.data, count=99, batch_size=3, seq_len=9)))
    assert torch.equal(everything.flatten(), ALPHABET.data)
    assert list(corpus.windows(ALPHABET.data[:9], count=5, batch_size=2, seq_len=9)) == []
