"""Reports of compiled kernels, on disk: a kernel whose report several tests read is compiled once.

The processes of one run share a folder, so it does not matter which test asks first, nor in which process. Nothing
outlives the run: no report can be that of older source.
"""

import hashlib
import json
import os
import tempfile
import zlib
from pathlib import Path

FOLDER = "COMPILED_KERNELS"
"""Names the environment variable that holds the folder, for processes inside the one that made it."""


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


def stored(key, compile):
    """``compile()``, plain data as JSON holds it, or what it returned before for the same key in this run.

    Args:
        key: a text that names everything on which the result depends.
        compile: a function without arguments. What it raises is not stored.
    """
    path = Path(os.environ[FOLDER]) / hashlib.sha256(key.encode()).hexdigest()
    if path.exists():
        return json.loads(zlib.decompress(path.read_bytes()))
    result = compile()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may read at any time: a file appears whole or not at all.
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_bytes(zlib.compress(json.dumps(result).encode(), 1))
    partial.replace(path)
    return result
