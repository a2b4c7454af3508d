"""The kinds of kernels in a step over ranks."""

from types import SimpleNamespace

import pytest

from bench.distributed.kernels import busy, kinds


def event(name, start, end):
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=1e6 * start, end=1e6 * end))


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [([], 0), ([(0, 1), (2, 4)], 3), ([(2, 4), (0, 3)], 4), ([(0, 9), (1, 2), (3, 4)], 9), ([(0, 1), (1, 2)], 2)],
)
def test_time_in_any_span_counts_once(spans, seconds):
    assert busy(spans) == seconds


def test_collectives_run_beside_others():
    found = kinds(
        [
            event("hopper_matmul_kernel", 0, 4),
            event("quantize_kernel", 4, 5),
            event("triton_poi_fused_add_0", 6, 7),
            event("ncclDevKernel_AllGather", 3, 6),
        ]
    )
    assert found == {
        "gemm_seconds": 4, "cast_seconds": 1, "other_seconds": 1, "collective_seconds": 3, "busy_seconds": 7,
    }  # fmt: skip
