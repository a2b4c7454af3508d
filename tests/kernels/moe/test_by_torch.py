"""Sums over tokens by torch's grouped GEMM: when torch is asked, and that it computes what our kernels do."""

import pytest
import torch
from cases import cpu_and_cuda, normal
from grouped_runs import HOSTILE
from routings import ends, routing_cases
from tuned import ADA, H200

from tritonfp8 import reference
from tritonfp8.compat import hardware
from tritonfp8.launch import gemms
from tritonfp8.launch.gemms import by_torch
from tritonfp8.specs.testing import assert_bitwise_equal


def operands(tokens=100, m=48, n=64, dtype=torch.bfloat16):
    """Integers, whose sums are exact, as ``[M, tokens]`` and ``[N, tokens]``."""
    return tuple(normal(tokens, size, seed=size).round().to(dtype).t() for size in (m, n))


@pytest.fixture
def asked(monkeypatch):
    """Calls of torch's GEMM on this machine, which counts as an H200."""
    calls = []
    grouped_mm = torch.nn.functional.grouped_mm

    def log(*args, **kwargs):
        calls.append(args)
        return grouped_mm(*args, **kwargs)

    monkeypatch.setattr(hardware, "abilities", lambda _: H200)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", log)
    return calls


@pytest.mark.parametrize(("tokens", "sizes"), routing_cases())
def test_a_sum_over_tokens_is_torchs(asked, tokens, sizes):
    a, b = operands(tokens)
    assert_bitwise_equal(gemms.grouped_matmul(a, b, ends(sizes)) + 0, reference.grouped_matmul(a, b, ends(sizes)) + 0)
    assert len(asked) == 1


@cpu_and_cuda
@pytest.mark.parametrize("offsets", HOSTILE, ids=str)
def test_wrong_offsets_are_read_as_by_our_kernels(device, offsets):
    (a, b), offsets = operands(), torch.tensor(offsets, dtype=torch.int32)
    found = by_torch.sum_tokens(a.to(device), b.to(device), offsets.to(device))
    assert_bitwise_equal(found.cpu() + 0, reference.grouped_matmul(a, b, offsets) + 0)


@cpu_and_cuda
def test_what_belongs_to_no_group_is_not_read(device):
    (a, b), offsets = operands(), ends((30, 0, 40))
    expected = reference.grouped_matmul(a, b, offsets)
    a[:, 70:], b[:, 70:] = torch.nan, torch.inf
    found = by_torch.sum_tokens(a.to(device), b.to(device), offsets.to(device))
    assert_bitwise_equal(found.cpu() + 0, expected + 0)


def test_torch_is_asked_only_where_it_has_a_kernel(monkeypatch):
    def is_asked(a, b, device=H200):
        monkeypatch.setattr(hardware, "abilities", lambda _: device)
        return by_torch.can_sum(a, b)

    a, b = operands()
    assert is_asked(a, b)
    assert not is_asked(a, b, ADA)
    assert not is_asked(a, b, hardware.CPU)
    for other in (
        operands(dtype=torch.float16),
        operands(m=41),
        operands(n=41),
        operands(tokens=0),
        (a.contiguous(), b),
        (a, b.contiguous()),
    ):
        assert not is_asked(*other)
    # Rows of 16 bytes, but a result whose rows torch would pad.
    assert not is_asked(a, operands(n=64)[1][:60])
