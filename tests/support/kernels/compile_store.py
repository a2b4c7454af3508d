"""Reports of compiled kernels: reports of one run, in a folder, and committed reports, beside the tests.

The processes of one run share a folder, so a kernel whose report several tests read is compiled once, whichever test
asks first. ``REPORTS`` is committed: a kernel is not compiled again while its source, arguments, target, options and
Triton are the same. A sample is compiled anyway, which the commit chooses, and must give the committed reports.

``make reports`` compiles everything and writes ``REPORTS``; a change in ``kernels/`` needs it. Without it the tests
are as strict, and take minutes more.
"""

import functools
import hashlib
import json
import lzma
import os
import tempfile
from pathlib import Path

import sampling

FOLDER = "COMPILED_KERNELS"
"""Names the environment variable that holds the folder, for processes inside the one that made it."""
FRESH = "COMPILE_ALL_KERNELS"
"""Names the environment variable that has every kernel compiled."""
REPORTS = Path(__file__).resolve().parents[2] / "compile_only" / "reports.json.xz"
# Of so many committed reports one is made again in a run.
SAMPLE = 20


def share():
    """Make a folder for this process and its children, unless this one was started with a folder.

    Returns:
        An object that removes the folder when it is dropped; None if another process made the folder.
    """
    if FOLDER in os.environ:
        return None
    folder = tempfile.TemporaryDirectory(prefix="compiled-kernels-")
    os.environ[FOLDER] = folder.name
    return folder


@functools.cache
def committed():
    """The committed reports by the digest of their key; none if every kernel is to be compiled."""
    if os.environ.get(FRESH) or not REPORTS.exists():
        return {}
    return json.loads(lzma.decompress(REPORTS.read_bytes()))


def is_sampled(digest):
    """Whether the kernel of this digest is compiled at this commit although its report is committed."""
    return (int(digest, 16) + sampling.number()) % SAMPLE == 0


def stored(key, compile):
    """``compile()``, plain data as JSON holds it, or what it returned before for the same key.

    Args:
        key: a text that names everything on which the result depends.
        compile: a function without arguments. What it raises is not stored.

    Raises:
        AssertionError: the committed report of a sampled kernel is not the kernel's report.
    """
    digest = hashlib.sha256(key.encode()).hexdigest()
    known = committed().get(digest)
    if known is not None and not is_sampled(digest):
        return known
    path = Path(os.environ[FOLDER]) / digest
    if path.exists():
        return json.loads(path.read_text())
    # In the form in which JSON gives it back.
    result = json.loads(json.dumps(compile()))
    assert known in (None, result), f"{REPORTS.name} holds {known}, but compiled: {result}. Run: make reports"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read at any time: a file appears whole or not at all.
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(result))
    partial.replace(path)
    return result


def write(folder, path=REPORTS):
    """Write the reports in the folder of a run to ``path``, the file that is committed.

    Returns:
        A text: how many reports there are, how many kernels have another source than before, and how many of these
        compile to what no kernel compiled to before.
    """
    before = json.loads(lzma.decompress(path.read_bytes())) if path.exists() else {}
    found = {each.name: json.loads(each.read_text()) for each in sorted(Path(folder).iterdir())}
    path.write_bytes(lzma.compress(json.dumps(found).encode(), preset=9))
    known = {json.dumps(each) for each in before.values()}
    new = [json.dumps(each) for digest, each in found.items() if digest not in before]
    others = len([each for each in new if each not in known])
    return (
        f"{len(found)} reports; kernels of another source than before: {len(new)}; with other registers, spills or "
        f"instructions: {others}"
    )
