"""The calls of Python functions of the package that one step makes."""

import sys
from pathlib import Path

import tritonfp8

ROOT = Path(tritonfp8.__file__).parent
# What runs in place of kernels on a CPU, and tables that are read.
NOT_COUNTED = ("reference/", "specs/quant_spec.py", "specs/formats.py")


def calls_of(function):
    """``(names, result)`` of ``function()``: each call as ``file:function``; comprehensions are not counted."""
    names = []

    def note(frame, event, argument):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and path.startswith(str(ROOT)) and not name.startswith("<"):
            file = Path(path).relative_to(ROOT).as_posix()
            if not file.startswith(NOT_COUNTED):
                names.append(f"{file}:{name}")

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return names, result
