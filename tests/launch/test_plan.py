"""Plans as data, and running and repeating them; that repeated launches are the same is in tests/compile_only."""

import dataclasses
import threading
import warnings

import pytest
import torch
import triton
from cases import normal
from tuned import H200

from tritonfp8 import ops, recipes, reference
from tritonfp8.compat import triton_private
from tritonfp8.launch import casts, executor, gemms
from tritonfp8.launch.plan import Buffer, Planner, TensorMap, View, make_plan
from tritonfp8.specs import BLOCK_1X128, ROWWISE, QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr
from tritonfp8.tuning import space

ROW = QuantSpec("e4m3", ROWWISE, "fp32", "pow2").args[0]
VECTOR = QuantSpec("e4m3", BLOCK_1X128, "fp32", "pow2").args[0]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


def view(slot, *shape, dtype=BF16, aligned=True):
    return View.of(torch.empty(shape, dtype=dtype, device="meta"), slot)._replace(aligned=aligned)


def cast_plan(x, spec=ROW):
    return make_plan(casts.dense.plan_quantize, [x, None], (spec, False), H200)


def gemm_plan(m, n, k, spec=VECTOR, a_aligned=True, scale_strides=None, bias=None, device=H200, config=None, out=None):
    steps = 1 if spec == ROW else -(-k // 128)
    operands = []
    for slot, rows in ((0, m), (2, n)):
        scale = view(slot + 1, rows, steps, dtype=torch.float32)
        strides = scale_strides or (1, -(-rows // 4) * 4)
        operands += [view(slot, rows, k, dtype=E4M3, aligned=a_aligned or slot), scale._replace(strides=strides)]
    options = (spec, spec, None, BF16, "precise", config)
    return make_plan(gemms.dense.plan_scaled_matmul, [*operands, bias, None, out], options, device)


class TestPlans:
    """Made of layouts only: there is no memory, no GPU and no launch."""

    def test_a_cast(self):
        plan = cast_plan(view(0, 256, 512))
        assert plan.inputs == 2
        assert plan.buffers == (Buffer((256, 512), (512, 1), E4M3), Buffer((256, 1), (1, 1), torch.float32))
        [launch] = plan.launches
        assert launch.kernel.__name__ == "quantize_kernel"
        assert [pointer.slot for pointer in launch.pointers[:3]] == [0, 2, 3]
        assert launch.integers[:4] == (256, 512, 512, 1)
        assert launch.constants["QMAX"] == 448.0
        assert launch.options == {"num_warps": 4}
        found = [(out.slot, out.shape, out.dtype) for out in plan.outputs]
        assert found == [(2, (256, 512), E4M3), (3, (256, 1), torch.float32)]

    def test_the_same_key_gives_the_same_plan(self):
        for make in (
            lambda: make_plan(casts.both.plan_quantize_both, [view(0, 300, 512)], (ROW, ROW, False), H200),
            lambda: gemm_plan(256, 512, 384),
        ):
            assert make() == make()

    def test_partial_maxima_are_reduced_before_they_are_read(self):
        plan = make_plan(casts.both.plan_quantize_both, [view(0, 2048, 4096)], (ROW, ROW, False), H200)
        names = ["partial_amax_kernel", "maxima_kernel", "quantize_kernel"]
        assert [launch.kernel.__name__ for launch in plan.launches] == names
        partial, reduce, _ = plan.launches
        assert partial.pointers[1].slot == reduce.pointers[0].slot
        # The maxima of columns begin after the maxima of rows.
        assert partial.pointers[2].offset - partial.pointers[1].offset == 2048 * 2

    def test_a_gemm_uses_tma_if_the_layouts_allow_it(self):
        aligned, misaligned = gemm_plan(2048, 4096, 512), gemm_plan(2048, 4096, 512, a_aligned=False)
        assert aligned.launches[0].kernel.__name__ == "hopper_matmul_kernel"
        assert all(isinstance(pointer, TensorMap) for pointer in aligned.launches[0].pointers[:3])
        assert misaligned.launches[0].kernel.__name__ == "block_scaled_matmul_kernel"
        assert not any(isinstance(pointer, TensorMap) for pointer in misaligned.launches[0].pointers[:2])

    @pytest.mark.parametrize(("images", "kernel"), [(64, "hopper_matmul_kernel"), (63, "scaled_matmul_kernel")])
    def test_of_the_three_gemms_of_odd_tokens_only_grad_weight_does_without_tma(self, images, kernel):
        m, n, k = 197 * images, 5120, 1280
        plans = [gemm_plan(*sizes, spec=ROW) for sizes in ((m, n, k), (m, k, n), (n, k, m))]
        launched = [plan.launches[0].kernel.__name__ for plan in plans]
        assert launched == ["hopper_matmul_kernel", "hopper_matmul_kernel", kernel]

    def test_a_split_sum_has_a_workspace_and_a_reduce(self):
        config = next(config for config in space("blockwise", "precise") if config.split_k > 1)
        plan = gemm_plan(16, 4096, 4096, config=config)
        assert [launch.kernel.__name__ for launch in plan.launches][-1] == "reduce_parts_kernel"
        assert len(plan.buffers) == 2
        assert plan.outputs == (plan.launches[-1].pointers[1],)

    def test_a_given_output_is_an_input_and_not_returned(self):
        plan = gemm_plan(256, 512, 384, out=view(6, 256, 512))
        assert (plan.buffers, plan.outputs) == ((), ())
        assert any(pointer.view.slot == 6 for pointer in plan.launches[0].pointers[:3])

    def test_a_device_is_part_of_a_plan(self):
        slow = dataclasses.replace(H200, num_sms=8)
        assert gemm_plan(2048, 4096, 512, device=slow).launches[0].programs == 8

    @pytest.mark.parametrize(
        "plan",
        [
            lambda: cast_plan(view(0, 0, 512)),
            lambda: cast_plan(view(0, 3, 100, 128), "e4m3:128x128:fp32:pow2"),
            lambda: cast_plan(view(0, 3, 100, 128).transposed(0, 1)),
            lambda: gemm_plan(2048, 4096, 512, scale_strides=(4, 1)),
            lambda: gemm_plan(256, 512, 384, scale_strides=(1, 2**31)),
            lambda: gemm_plan(256, 512, 384, bias=view(4, 512)._replace(strides=(2,))),
        ],
        ids=["empty", "several matrices", "no matrix", "scales for no TMA", "far scales", "strided bias"],
    )
    def test_what_needs_more_than_buffers_and_launches_has_no_plan(self, plan):
        assert plan() is None


def test_scales_that_no_copy_brings_within_32_bits_are_an_error():
    a = torch.empty(2**20, 2**17, dtype=E4M3, device="meta")
    scale = torch.empty(2**20, 2**12, dtype=torch.float8_e8m0fnu, device="meta")
    with pytest.raises(ValueError, match=r"fewer than 2\^31 elements; got \(1048576, 4096\).*multiply parts"):
        gemms.scaled_matmul(a, scale, "e4m3:1x32:e8m0:pow2", a, scale, "e4m3:1x32:e8m0:pow2")


def test_views_are_those_of_torch():
    x = torch.empty(4, 6, 8)
    assert View.of(x.transpose(1, 2)) == View.of(x).transposed(1, 2)
    assert View.of(x).folded()[1:] == View.of(x.view(24, 8))[1:]
    assert View.of(x.transpose(0, 1)).folded() is None
    assert View.of(x[0].t()) == View.of(x[0]).t()
    for y in (x, x.transpose(0, 1), x[:, :1], x[::2], x[:1].transpose(0, 1), x[..., 0]):
        assert View.of(y).is_contiguous() == y.is_contiguous()
    part = View.of(x).strided((2, 2), (8, 1), 5)
    assert (part.offset, part.retyped(torch.int32).dtype) == (20, torch.int32)


class Kernel:
    """Stands for a kernel."""

    __name__ = "some_kernel"


def plan_scaled(plan: Planner, x, y, factor):
    """A buffer of the size of x, and a view of a zeroed one."""
    if factor == 0:
        return None
    out, zeros = plan.empty(x.shape, x.dtype), plan.empty((4, 6), torch.int32, zeroed=True)
    plan.launch(Kernel, 3, (x, y, out, zeros.strided((2, 2), (6, 1), 1)), (factor,), {"SIZE": 5}, num_warps=4)
    return [out, zeros.retyped(torch.float32).strided((2, 3), (6, 1), 6)]


@pytest.fixture
def launched(monkeypatch):
    """Launches through Triton, and repeated launches: (stream, addresses)."""
    through_triton, repeated = [], []

    def run(kernel, programs, pointers, integers, constants, **options):
        through_triton.append((kernel, programs, pointers, integers, constants, options))
        return "compiled"

    def raw_launches(slots, calls):
        assert slots == 4
        [call] = calls
        assert (call.compiled, call.programs) == ("compiled", 3)
        assert call.others[:-1] == (2, 5) or call.others[:-1] == (3, 5)
        return lambda stream, addresses: repeated.append((stream, call.pointers, list(addresses)))

    monkeypatch.setattr(executor, "run", run)
    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(executor, "_warned", set())
    monkeypatch.setattr(triton_private, "INTERPRETING", False)
    monkeypatch.setattr(triton_private, "MISSING", ())
    monkeypatch.setattr(triton_private, "raw_launches", raw_launches)
    monkeypatch.setattr(triton_private, "stream_getter", lambda: lambda index: f"stream of {threading.get_ident()}")
    return through_triton, repeated


def call(x, y=None, factor=2):
    return executor.planned(plan_scaled, (x, y), (factor,))


def test_two_calls_go_through_triton_and_the_next_is_repeated(launched):
    through_triton, repeated = launched
    x = normal(4, 5)
    call(x)
    assert (len(through_triton), repeated) == (1, [])
    through_triton.clear()
    results = call(x)
    [(kernel, programs, pointers, integers, constants, options)] = through_triton
    assert (kernel, programs, tuple(integers), constants, options) == (Kernel, 3, (2,), {"SIZE": 5}, {"num_warps": 4})
    assert pointers[0] is x
    assert pointers[1] is None
    assert pointers[2] is results[0]
    assert pointers[3].data_ptr() == results[1].data_ptr() - 5 * 4
    other = normal(4, 5, seed=1)
    again = call(other)
    assert len(through_triton) == 1
    [(stream, places, addresses)] = repeated
    assert stream == f"stream of {threading.get_ident()}"
    assert places == [(0, 0), None, (2, 0), (3, 4)]
    assert addresses[:3] == [other.data_ptr(), None, again[0].data_ptr()]
    for first, second in zip(results, again, strict=True):
        assert (first.shape, first.stride(), first.dtype) == (second.shape, second.stride(), second.dtype)
        assert first.data_ptr() != second.data_ptr()
    assert not again[1].any()
    assert again[1].data_ptr() == addresses[3] + 6 * 4


def test_the_stream_is_that_of_the_calling_thread(launched):
    _, repeated = launched
    x = normal(4, 5)
    for _ in range(2):
        call(x)
    thread = threading.Thread(target=call, args=(x,))
    thread.start()
    thread.join()
    call(x)
    assert len({stream for stream, *_ in repeated}) == 2


def test_one_tensor_may_be_two_arguments(launched):
    _, repeated = launched
    x = normal(4, 5)
    for _ in range(3):
        call(x, x)
    assert repeated[0][1][:2] == [(0, 0), (1, 0)]
    assert repeated[0][2][:2] == [x.data_ptr()] * 2


def test_a_plan_is_for_one_kind_of_arguments(launched):
    """Shape, strides, dtype and alignment of each tensor, its absence, and the options."""
    through_triton, _ = launched

    def x():
        return normal(6, 6)

    others = [x().bfloat16(), x().t(), x()[:5], normal(37)[1:].view(6, 6), normal(38)[2:].view(6, 6)]
    kinds = [(x(),), (x(), x()), (x(), None, 3)]
    kinds += [kind for y in others for kind in ((y,), (y, x()), (x(), y))]
    for kind in kinds:
        for _ in range(3):
            call(*kind)
    assert len(through_triton) == 2 * len(executor._plans) == 2 * len(kinds)
    executor.forget()
    assert not executor._plans


def test_a_call_without_a_plan_launches_nothing(launched):
    assert call(normal(4, 5), factor=0) is None
    assert launched == ([], [])
    # The next call knows.
    assert [known.plan for known in executor._plans.values()] == [None]
    assert call(normal(4, 5), factor=0) is None


def test_a_failed_first_call_leaves_no_plan(launched, monkeypatch):
    """Such as one while a CUDA graph is captured."""

    def fail(*args, **options):
        raise RuntimeError("before the capture")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", fail)
        with pytest.raises(RuntimeError, match="before the capture"):
            call(normal(4, 5))
    assert not executor._plans
    assert call(normal(4, 5)) is not None


def test_a_profiler_sees_the_launches(launched, monkeypatch):
    through_triton, repeated = launched
    x = normal(4, 5)
    for _ in range(2):
        call(x)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        call(x)
    assert (len(through_triton), len(repeated)) == (3, 0)
    call(x)
    assert (len(through_triton), len(repeated)) == (3, 1)


def test_without_triton_s_private_names_triton_launches_and_one_warning_says_so(launched, monkeypatch):
    through_triton, repeated = launched
    monkeypatch.setattr(triton_private, "MISSING", ("Triton 9.9.0 is none of 3.6",))
    with pytest.warns(UserWarning, match=r"more host time: Triton 9.9.0 is none of 3.6"):
        call(normal(4, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for factor in (2, 3, 3):
            call(normal(4, 5), factor=factor)
    assert (len(through_triton), len(repeated)) == (4, 0)


def test_a_kernel_that_cannot_be_launched_directly_goes_through_triton(launched, monkeypatch):
    def refuse(*args):
        raise triton_private.UnavailableError("a kernel needs scratch memory")

    through_triton, repeated = launched
    monkeypatch.setattr(triton_private, "raw_launches", refuse)
    call(normal(4, 5))
    with pytest.warns(UserWarning, match="scratch memory"):
        call(normal(4, 5))
    call(normal(4, 5))
    assert (len(through_triton), len(repeated)) == (3, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_repeats_compute_what_triton_s_own_launches_do(name, monkeypatch):
    """Other tensors of the same kind, freed and allocated again in between, on two streams."""
    gemm = recipes.get(name).grad_weight
    executor.forget()
    for seed in range(6):
        stream = torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            x = normal(160, 300, seed=seed, dtype=torch.bfloat16, device="cuda")
            a = ops.quantize(x, *gemm.lhs.args)
            b, b_scale, t, t_scale = ops.quantize_both(x * 2, *gemm.rhs.args, *gemm.rhs.args)
            options = None, None, None, torch.float32, "precise"
            args = *a, *gemm.lhs.args, b, b_scale, *gemm.rhs.args, *options
            out = ops.scaled_matmul(*args)
            with monkeypatch.context() as patch:
                patch.setattr(executor, "_plans", {})
                patch.setattr(triton_private, "MISSING", ("a name",))
                patch.setattr(executor, "_warned", {"a name"})
                launched = gemms.scaled_matmul(*args)
        torch.cuda.synchronize()
        assert_bitwise_equal(a, reference.quantize(x, *gemm.lhs.args))
        expected = reference.quantize_both(x * 2, *gemm.rhs.args, *gemm.rhs.args)
        assert_bitwise_equal((b, b_scale, t, t_scale), expected)
        assert_bitwise_equal(out, launched)
        values = reference.dequantize(*a, *gemm.lhs.args, torch.float32)
        others = reference.dequantize(b, b_scale, *gemm.rhs.args, torch.float32)
        assert sqnr(out, values @ others.t()) >= 60
