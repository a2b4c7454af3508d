"""What is repeated and what is not; that repeated launches are the same is in tests/compile_only."""

from collections.abc import Sequence

import pytest
import torch
import triton
from cases import normal

from tritonfp8 import ops, recipes, reference
from tritonfp8.launch import cast, kernel_cache, plan
from tritonfp8.testing import assert_bitwise_equal, sqnr


@pytest.fixture
def calls(monkeypatch):
    """A decorated function that launches nothing, as on a GPU, and the arguments of the calls that reached it."""
    monkeypatch.setattr(kernel_cache, "INTERPRETING", False)
    monkeypatch.setattr(plan, "_plans", {})
    seen = []

    @plan.replayed
    def double(x: torch.Tensor, block: Sequence[int], factor: int = 2, *, option: int | None = None) -> torch.Tensor:
        seen.append((x, block, factor, option))
        return x * factor

    return double, seen


def test_what_ran_another_op_is_done_again(calls):
    """A multiplication is no launch: were it repeated, the second result would be uninitialized memory."""
    double, seen = calls
    for seed in range(3):
        x = normal(4, 5, seed=seed)
        assert_bitwise_equal(double(x, [1, 2]), x * 2)
    assert len(seen) == 3
    assert list(plan._plans.values()) == [None]


def test_a_plan_is_for_one_kind_of_arguments(calls):
    double, _ = calls
    x = normal(4, 6)
    kinds = [
        (x, [1, 2]), (x, [1, 3]), (x.bfloat16(), [1, 2]), (x.t(), [1, 2]), (x[1:], [1, 2]), (normal(25)[1:], [1, 2]),
        (x, [1, 2], 3),
    ]  # fmt: skip
    for kind in kinds:
        double(*kind)
        double(*kind)
    assert len(plan._plans) == len(kinds)
    # The default is a value as any other.
    double(x, [1, 2], 2)
    assert len(plan._plans) == len(kinds)
    plan.forget()
    assert not plan._plans


def test_options_are_for_the_function_alone(calls):
    double, seen = calls
    x = normal(4, 5)
    assert_bitwise_equal(double(x, [1, 2], factor=3, option=7), x * 3)
    assert seen == [(x, [1, 2], 3, 7)]
    assert not plan._plans


def test_one_tensor_in_two_places_is_no_plan(monkeypatch):
    monkeypatch.setattr(kernel_cache, "INTERPRETING", False)
    monkeypatch.setattr(plan, "_plans", {})

    @plan.replayed
    def both(a: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        return a + b

    x = normal(3, 4)
    both(x, x)
    assert not plan._plans
    both(x, x.clone())
    assert len(plan._plans) == 1


def test_every_tensor_tells_plans_apart(monkeypatch):
    """Shape, strides, dtype and alignment, of the tensors that must be there and of one that need not be."""
    monkeypatch.setattr(kernel_cache, "INTERPRETING", False)
    monkeypatch.setattr(plan, "_plans", {})

    @plan.replayed
    def add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        return a.sum() + b.sum() + (0 if c is None else c.sum())

    def x():
        return normal(6, 6)

    others = [x().bfloat16(), x().t(), x()[:5], normal(37)[1:].view(6, 6), normal(38)[2:].view(6, 6)]
    kinds = [(x(), x()), (x(), x(), x())]
    kinds += [kind for y in others for kind in ((x(), y), (y, x()), (x(), y, x()), (y, x(), x()), (x(), x(), y))]
    for kind in kinds:
        add(*kind)
        add(*kind)
    assert len(plan._plans) == len(kinds)


def test_a_profiler_sees_the_launches(calls, monkeypatch):
    double, _ = calls
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    double(normal(4, 5), [1, 2])
    assert not plan._plans


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_replays_compute_what_the_first_call_did(name):
    """Other tensors of the same kind, freed and allocated anew in between, on two streams."""
    gemm = recipes.get(name).grad_weight
    plan.forget()
    for seed in range(6):
        stream = torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            x = normal(160, 300, seed=seed, dtype=torch.bfloat16, device="cuda")
            a = ops.quantize(x, *gemm.lhs.args)
            b, b_scale, t, t_scale = ops.quantize_both(x * 2, *gemm.rhs.args, *gemm.rhs.args)
            args = (
                *a, *gemm.lhs.args, b, b_scale, *gemm.rhs.args, None, None, None, torch.float32, "precise"
            )  # fmt: skip
            out = ops.scaled_matmul(*args)
            launched = cast.scaled_matmul.__wrapped__(*args)
        torch.cuda.synchronize()
        assert_bitwise_equal(a, reference.quantize(x, *gemm.lhs.args))
        expected = reference.quantize_both(x * 2, *gemm.rhs.args, *gemm.rhs.args)
        assert_bitwise_equal((b, b_scale, t, t_scale), expected)
        assert_bitwise_equal(out, launched)
        product = (
            reference.dequantize(*a, *gemm.lhs.args, torch.float32)
            @ reference.dequantize(b, b_scale, *gemm.rhs.args, torch.float32).t()
        )
        assert sqnr(out, product) >= 60
