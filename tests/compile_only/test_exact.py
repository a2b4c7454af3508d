"""Kernels whose rows have bits of their own compile: for Hopper without spills where speed counts, elsewhere at all."""

import pytest
import torch
from compile_target import compile_launch, note_launches

from tritonfp8.launch import exact
from tritonfp8.launch.exact import attention, gemm

BF16, FP32 = torch.bfloat16, torch.float32
CAPABILITIES = (89, 90, 100)
# Shared memory of a block, by compute capability.
SHARED = {89: 101376, 90: 232448, 100: 232448}


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def heads(d, t, s, dtype=BF16):
    """Queries, keys and values in the layout that linear layers give them."""
    shapes = ((2, t, 8, d), (2, s, 2, d), (2, s, 2, d))
    return [empty(*shape, dtype=dtype).transpose(1, 2) for shape in shapes]


def compiled(monkeypatch, cc, call):
    """The reports of what a call launches, by the name of the kernel."""
    abilities = {"has_tma": cc >= 90, "has_warpgroup_mma": cc == 90, "has_native_mx": cc == 100}
    found = note_launches(monkeypatch, cc, **abilities)
    call()
    return {kernel.__name__: compile_launch(cc, kernel, *arguments, **options) for kernel, arguments, options in found}


# Bytes a thread: head size, dtype, queries -> the most that may spill on Hopper.
FORWARD = {
    **{(d, BF16, t): 0 for d in (64, 80, 96, 128, 192, 256) for t in (1, 1024)},
    # FMAs instead of tensor cores.
    (64, FP32, 1024): 0,
    (128, FP32, 1024): 1000,
    (256, FP32, 1): 6000,
}


@pytest.mark.parametrize(("case", "spill_bytes"), FORWARD.items(), ids=str)
def test_attention_on_hopper(monkeypatch, case, spill_bytes):
    d, dtype, t = case
    found = compiled(monkeypatch, 90, lambda: exact.exact_attention(*heads(d, t, 1024, dtype), 0.1))
    assert set(found) == ({"attention_kernel", "merge_parts_kernel"} if t == 1 else {"attention_kernel"})
    report = found["attention_kernel"]
    assert ("wgmma.mma_async" in report.ptx) == (dtype == BF16)
    assert ("cp.async.bulk.tensor" in report.ptx) == (dtype == BF16 or d != 80)
    for each in found.values():
        assert each.spill_bytes <= spill_bytes, each.log
        assert each.shared_bytes <= SHARED[90]


# Of padded sequences, whose keys are read by pointers: a tile of 128 rows takes all registers.
@pytest.mark.parametrize(("t", "window", "spill_bytes"), [(1, 0, 0), (1, 300, 0), (1024, 0, 200), (1024, 300, 200)])
def test_attention_of_padded_sequences(monkeypatch, t, window, spill_bytes):
    places = empty(2, 2, dtype=torch.int32)
    found = compiled(monkeypatch, 90, lambda: exact.exact_attention(*heads(128, t, 1024), 0.1, window, places))
    for report in found.values():
        assert report.spill_bytes <= spill_bytes, report.log


@pytest.mark.parametrize("cc", [89, 100])
@pytest.mark.parametrize("d", [64, 128])
def test_attention_elsewhere(monkeypatch, cc, d):
    for report in compiled(monkeypatch, cc, lambda: exact.exact_attention(*heads(d, 1024, 1024), 0.1)).values():
        assert report.shared_bytes <= SHARED[cc]
        # Ada keeps operands in registers, too.
        assert report.spill_bytes <= (1100 if (cc, d) == (89, 128) else 0), report.log


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize(("d", "dtype"), [(64, BF16), (128, BF16), (64, FP32)])
def test_backward(monkeypatch, cc, d, dtype):
    q, k, v = heads(d, 1024, 1024, dtype)
    out, logsumexp = empty(2, 1024, 8, d, dtype=dtype), empty(2, 8, 1024, dtype=FP32)
    found = compiled(monkeypatch, cc, lambda: attention._by_kernels(out, q, k, v, out, logsumexp, 0.1))
    assert len(found) == 3
    for name, report in found.items():
        spills = dtype == FP32 or (cc, d) == (89, 128)
        assert report.spill_bytes <= (900 if spills else 0), (name, report.log)
        assert report.shared_bytes <= SHARED[cc]


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize("m", [1, 4096])
def test_matmul(monkeypatch, cc, m):
    operands = empty(m, 4096), empty(4096, 4096), empty(4096)
    (report,) = compiled(monkeypatch, cc, lambda: gemm.matmul(*operands, True)).values()
    assert report.spill_bytes == 0, report.log
    assert report.shared_bytes <= SHARED[cc]
    if cc == 90:
        assert "wgmma.mma_async" in report.ptx
        assert "cp.async.bulk.tensor" in report.ptx


@pytest.mark.parametrize("cc", CAPABILITIES)
@pytest.mark.parametrize("n", [128, 4096, 8192, 16384])
def test_rows(monkeypatch, cc, n):
    x, weight, rstd = empty(64, n), empty(n), empty(64, dtype=FP32)
    calls = {
        "rms_norm_kernel": lambda: exact.rms_norm(x, weight, 1e-5),
        "rms_norm_backward_kernel": lambda: exact.rms_norm_backward(x, x, weight, rstd),
        "row_logsumexp_kernel": lambda: exact.row_logsumexp(x, 0.7),
        "gated_kernel": lambda: exact.gated(x, x, "gelu_tanh"),
        "gated_backward_kernel": lambda: exact.gated_backward(x, x, x, "silu"),
    }
    for name, call in calls.items():
        found = compiled(monkeypatch, cc, call)
        assert name in found
        for kernel, report in found.items():
            # The weight, its gradient and the row of 16 elements a thread fill the 64 registers of a thread.
            most = 160 if (kernel, n) == ("rms_norm_backward_kernel", 16384) else 0
            assert report.spill_bytes <= most, (kernel, report.log)
