"""What is private of torch: checked by name, and what serves in its place."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.compiler import assume_constant_result
from torch.fx.experimental.proxy_tensor import make_fx

from tritonfp8.compat import torch_private


def test_missing_names_are_an_error_that_names_them():
    assert torch_private.find_missing() == ()
    missing = torch_private.find_missing(SimpleNamespace(_C=SimpleNamespace(DispatchKey=torch._C.DispatchKey)))
    assert len(missing) == len(torch_private.WITHOUT_FALLBACK) - 1
    with pytest.raises(ImportError, match=r"torch._C._len_torch_dispatch_stack \(the number of.*Install one of torch"):
        torch_private.require(missing)
    torch_private.require(())


def test_allocation_by_the_private_name_and_by_the_public_one(monkeypatch):
    layout = (4, 6), (1, 8), torch.float16
    by_name = torch_private.empty_strided(torch.device("cpu"))(*layout)
    monkeypatch.setattr(torch_private, "_C", SimpleNamespace())
    public = torch_private.empty_strided(torch.device("cpu"))(*layout)
    for x in (by_name, public):
        assert (tuple(x.shape), x.stride(), x.dtype) == layout


def test_the_public_names_serve_in_place_of_private_ones(monkeypatch):
    monkeypatch.setattr(torch_private, "_C", SimpleNamespace())
    assert torch_private.current_device_getter() is torch.cuda.current_device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_private._public_raw_stream(0) == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=40 + device))
    assert torch_private._public_raw_stream(2) == 42


def test_tracing_is_seen():
    seen = []

    def note(x):
        seen.append(torch_private.is_traced())
        return x + 1

    note(torch.zeros(2))
    make_fx(note)(torch.zeros(2))
    torch.jit.trace(note, torch.zeros(2), check_trace=False)
    assert seen == [False, True, True]


def test_open_transforms_are_seen():
    """Of torch.func, inside each other too, and of forward-mode derivatives."""
    seen = []

    def note(x):
        seen.append((torch_private.is_transformed(), torch_private.is_functionalized()))
        return x.sum()

    x = torch.zeros(2, 3)
    note(x)
    torch.vmap(torch.func.grad(note))(x)
    torch.func.functionalize(note)(x)
    with torch.autograd.forward_ad.dual_level():
        note(x)
    note(x)
    assert seen == [(False, False), (True, False), (True, True), (True, False), (False, False)]


def test_a_write_skips_the_transforms():
    kept = torch.zeros(3)

    def write(x):
        with torch_private.outside_transforms():
            kept.add_(1)
        return x.sum()

    torch.func.grad(write)(torch.zeros(3))
    assert kept.tolist() == [1, 1, 1]


def test_a_constant_for_dynamo_is_marked_as_the_public_decorator_marks_it():
    ours, public = (mark(lambda: None) for mark in (torch_private.constant_for_dynamo, assume_constant_result))
    assert vars(ours) == vars(public) != {}


def test_the_import_leaves_the_compiler_alone():
    """Importing Dynamo takes as long as importing torch."""
    program = "import sys, tritonfp8; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
