"""Launching what was compiled before; and CUDA graphs, which can hold nothing else."""

import dataclasses
import itertools
from unittest.mock import ANY

import pytest
import torch
from cases import normal
from torch import nn
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import BaseBackend

from tritonfp8 import convert, recipes
from tritonfp8.compat import hardware, triton_private
from tritonfp8.launch import executor, kernel_cache
from tritonfp8.specs.testing import assert_bitwise_equal


class Kernel:
    """Stands for a compiled kernel and for what compiles it; notes which of the two a launch went through."""

    __name__ = "some_kernel"

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append(("found" if len(grid) == 3 else "compiled", grid[0], args, options))
            return self

        return launch


@pytest.fixture(params=[False, True], ids=["in turn", "dependent"])
def dependent(request):
    return request.param


@pytest.fixture
def kernel(monkeypatch, dependent):
    device = dataclasses.replace(hardware.CPU, has_dependent_launch=dependent)
    monkeypatch.setattr(hardware, "abilities", lambda index: device)
    monkeypatch.setattr(triton_private, "INTERPRETING", False)
    monkeypatch.setattr(triton_private, "MISSING", ())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(kernel_cache, "_compiled", {})
    return Kernel()


def run(kernel, x, integers=(3, 5), constants=None, programs=7):
    kernel_cache.run(kernel, programs, (x, None), integers, constants or {"BLOCK": 64}, num_warps=4)
    return kernel.launches[-1]


def test_the_second_launch_compiles_nothing(kernel, dependent):
    x = torch.zeros(8)
    options = {"BLOCK": 64, "num_warps": 4, "DEPENDENT": dependent, "enable_fp_fusion": True}
    options |= {"launch_pdl": True} if dependent else {}
    assert run(kernel, x) == ("compiled", 7, (x, None, 3, 5), options)
    assert run(kernel, x, programs=9) == ("found", 9, (x, None, 3, 5, 64, dependent), {})


@pytest.mark.parametrize(
    "other",
    [{"x": torch.zeros(8, dtype=torch.bfloat16)}, {"x": torch.zeros(9)[1:]},
     {"integers": (3, 1)}, {"integers": (3, 16)}, {"integers": (3, 2**31 + 1)}, {"constants": {"BLOCK": 128}}],
    ids=["dtype", "alignment", "one", "divisible", "64 bits", "constant"],
)  # fmt: skip
def test_what_a_kernel_is_compiled_for(kernel, other):
    run(kernel, torch.zeros(8))
    assert run(kernel, **{"x": torch.zeros(8), **other})[0] == "compiled"


def test_another_number_of_tokens_compiles_nothing(kernel):
    """Of integers Triton knows only whether they are 1, multiples of 16, and of 32 bits."""
    run(kernel, torch.zeros(8))
    assert run(kernel, torch.zeros(8), (3, 6)) == ("found", 7, (kernel.launches[-1][2][0], None, 3, 6, 64, ANY), {})


@pytest.mark.parametrize("integers", [(1, 0, 2, 3, 15, 16, 17, 32, 4096, 4097), (2**31 - 1, 2**31, 2**31 + 1, 2**40)])
def test_integers_of_one_kind_are_one_to_triton(integers):
    specialized = {x: native_specialize_impl(BaseBackend, x, False, True, True) for x in integers}
    for x, y in itertools.combinations(integers, 2):
        assert (kernel_cache._kind(x) == kernel_cache._kind(y)) == (specialized[x] == specialized[y])


def test_without_triton_s_private_names_every_launch_is_its_own(kernel, dependent, monkeypatch):
    """What was compiled is not launched directly; the error of a captured first launch stays."""
    monkeypatch.setattr(triton_private, "MISSING", ("a name",))
    x = torch.zeros(8)
    first = run(kernel, x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(kernel, x) == first
    assert first[0] == "compiled"
    with pytest.raises(RuntimeError, match="before the capture"):
        run(kernel, x, (3, 16))


def test_capture_before_the_first_launch_is_an_error(kernel, monkeypatch):
    x = torch.zeros(8)
    run(kernel, x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert run(kernel, x)[0] == "found"
    with pytest.raises(RuntimeError, match=r"some_kernel was not launched before.*\(3, 16\).*before the capture"):
        run(kernel, x, (3, 16))
    assert len(kernel.launches) == 2


def model_and_input():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 384), nn.GELU(), nn.Linear(384, 256, bias=False)).cuda().bfloat16()
    return model, normal(160, 256, dtype=torch.bfloat16, device="cuda").requires_grad_()


@pytest.mark.gpu
@pytest.mark.parametrize("name", recipes.names())
def test_a_graph_of_forward_and_backward_replays_the_same_bits(name):
    model, x = model_and_input()
    convert(model, name)
    wanted = (x, *model.parameters())

    def step():
        out = model(x)
        return out, *torch.autograd.grad(out.float().square().sum(), wanted)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(1, 4):
        with torch.no_grad():
            x.copy_(normal(160, 256, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in captured]
        assert_bitwise_equal(replayed, list(step()))


@pytest.mark.gpu
def test_capture_without_a_step_before_says_so():
    model, x = model_and_input()
    convert(model, "rowwise")
    # As in a process that has launched nothing yet, neither these kernels nor these calls.
    kernel_cache._compiled.clear()
    executor.forget()
    with pytest.raises(RuntimeError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(x)
    torch.cuda.synchronize()
