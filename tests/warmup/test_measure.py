"""tune: what is measured, checked, saved and chosen. On the CPU every configuration runs the reference."""

import contextlib
import dataclasses
import math
import time

import pytest
import torch
from cases import INTERPRETER, QUANTIZED
from op_samples import SAMPLES
from tuned import CPU_MACHINE, entry, layer_products, stored
from warmup_jobs import SHAPES, choices, last_is_fastest

from tritonfp8 import launch, ops, tuning
from tritonfp8.compat import hardware
from tritonfp8.specs.testing import assert_matmul_close
from tritonfp8.warmup import gemms, measure
from tritonfp8.warmup.gemms import GemmCall
from tritonfp8.warmup.measure import tune
from tritonfp8.warmup.record import Call, Layout, Recorder, record_linear

CPU = torch.device("cpu")


pytestmark = pytest.mark.usefixtures("home")


def with_epilogues(calls):
    """The first product among ``calls`` with an activation, with a residual and with a float32 output."""
    call = next(call for call in calls if call.op == "scaled_matmul")
    m, n = call.named()["a"].shape[0], call.named()["b"].shape[0]
    residual = Layout((m, n), (n, 1), 0, torch.bfloat16)
    for change in ({"activation": "gelu"}, {"residual": residual}, {"out_dtype": torch.float32}):
        yield Call(call.op, tuple({**call.named(), **change}.values()))


class TestProducts:
    def test_the_key_is_that_of_the_launch(self, monkeypatch):
        """What launch_matmul asks tuning for, for the same call."""
        asked = []

        def choose(family, accumulation, rows, m, n, k, out_itemsize, bare, copy_engine, device, batch_invariant):
            assert not batch_invariant
            kind = tuning.kind(family, accumulation, rows, out_itemsize, bare, copy_engine)
            asked.append(tuning.key(kind, m, n, k))
            raise LookupError

        shapes = (*SHAPES, (33, 70, 50))
        calls = [call for mnk in shapes for recipe in QUANTIZED for call in record_linear(mnk, recipe, "bfloat16")]
        for call in [*(call for call in calls if call.op == "scaled_matmul"), *with_epilogues(calls)]:
            for has_tma in (False, True):
                cpu = dataclasses.replace(hardware.CPU, has_tma=has_tma)
                with monkeypatch.context() as patch:
                    patch.setattr(tuning, "choose", choose)
                    patch.setattr(hardware, "abilities", lambda device, cpu=cpu: cpu)
                    gemm = GemmCall.of(call, CPU)
                    with pytest.raises(LookupError) if gemm.has_configurations(CPU) else contextlib.nullcontext():
                        launch.gemms.scaled_matmul(*call.arguments("cpu"))
                    assert not gemm.has_configurations(CPU) or asked[-1] == gemm.key
        assert {at.kind.copy_engine for at in asked} == {True, False}
        assert {at.kind.bare for at in asked} == {True, False}
        assert {at.kind.out_itemsize for at in asked} == {2, 4}
        assert {at.kind.family for at in asked} == {"epilogue", "blockwise", "mx"}

    def test_gemms_that_launch_no_configuration_are_not_measured(self):
        calls = [call for m in (64, 65) for call in record_linear((m, 128, 256), "mxfp8", "bfloat16")]
        found = measure.distinct_gemms([call for call in calls if call.op == "scaled_matmul"], CPU)
        # Of 64 tokens output and grad_input; grad_weight has the features of the output as M, whatever the tokens are.
        assert {gemm.m for gemm in found} == {64}
        assert len(found) == 2

    def test_products_of_one_key_are_one(self):
        calls, found = layer_products((4096, 48, 32), (4000, 48, 32))
        assert sum(call.op == "scaled_matmul" for call in calls) == 6
        # Output and grad_input share a bucket of M; grad_weight has the tokens as K.
        assert len(found) == 4
        # Candidates are few and can run.
        _, found = layer_products((4096, 4096, 4096))
        assert all(0 < len(product.candidates(CPU)) <= gemms.MAX_CANDIDATES for product in found)


class TestTune:
    def test_the_fastest_is_chosen_saved_and_not_measured_again(self):
        calls, found = layer_products(*SHAPES)
        before = choices()
        done = tune(calls, "cpu", workers=0, timer=last_is_fastest)
        assert done.failed == ()
        assert set(done.entries) == {product.key for product in found}
        assert stored() == done.entries
        for product in found:
            last = product.candidates(CPU)[-1]
            assert product.chosen(CPU) is last
            assert done.entries[product.key].config == last.name
            assert done.entries[product.key].microseconds == pytest.approx(1e6 / len(product.candidates(CPU)), rel=1e-3)
        tuning.reload()
        assert choices() == {str(product): product.candidates(CPU)[-1].name for product in found} != before

        again = tune(calls, "cpu", workers=0, timer=pytest.fail)
        assert (again.entries, again.skipped, again.failed) == ({}, len(found), ())
        forced = tune(calls, "cpu", workers=0, timer=lambda fs: [1.0] * len(fs), force=True)
        assert len(forced.entries) == len(found)
        assert choices() == {str(product): product.candidates(CPU)[0].name for product in found}

    @pytest.mark.parametrize("change", [{"triton": "0"}, {"tritonfp8": "0"}, {"config": "gone"}])
    def test_entries_of_other_versions_are_measured_again(self, change):
        calls, found = layer_products(SHAPES[0])
        old = dataclasses.replace(entry(found[0].candidates(CPU)[0].name, **measure.versions()), **change)
        tuning.install({product.key: old for product in found}, CPU_MACHINE)
        assert len(tune(calls, "cpu", workers=0, timer=last_is_fastest).entries) == len(found)

    def test_long_functions_that_are_nearly_the_fastest_are_measured_at_settled_clocks(self, monkeypatch):
        """One that is third while the GPU rests is the first in training; the slowest is not tried."""
        cool, asked = [1.0, 1.1, 1.15, 1.3], []
        monkeypatch.setattr(measure, "cool_seconds", lambda functions, rounds: cool)
        monkeypatch.setattr(measure, "settled_seconds", lambda functions: asked.extend(functions) or [1.6, 1.5, 1.4])
        assert measure.cuda_seconds("abcd") == [1.6, 1.5, 1.4, math.inf]
        assert asked == ["a", "b", "c"]
        for cool in ([1e-5, 1.1e-5], [1.0, 2.0]):
            assert measure.cuda_seconds("ab") == cool
        assert asked == ["a", "b", "c"]

    def test_the_last_runs_of_each_round_count(self, monkeypatch):
        """A run of 10 ms needs 20 of them until 0.2 s are over. Every other round runs in reverse."""
        runs, order = [], []

        def gpu_seconds(functions, before):
            runs.append(len(functions))
            order.append(functions[0])
            return [1.0] * (len(functions) - measure.SETTLED_RUNS) + [0.01 * functions[0]] * measure.SETTLED_RUNS

        monkeypatch.setattr(
            measure.timers, "gpu_seconds", lambda *args: [0.01] * 2 if len(args[0]) == 2 else gpu_seconds(*args)
        )
        monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.zeros(1))
        assert measure.settled_seconds([2, 3, 4]) == pytest.approx([0.02, 0.03, 0.04])
        assert runs == [20 + measure.SETTLED_RUNS] * 3 * measure.SETTLED_ROUNDS
        assert order == [2, 3, 4, 4, 3, 2] * (measure.SETTLED_ROUNDS // 2)

    def test_each_product_is_saved_before_the_next(self):
        calls, found = layer_products(*SHAPES)
        sizes = []

        def timer(functions):
            sizes.append(len(stored()))
            if len(sizes) == 3:
                raise KeyboardInterrupt
            return last_is_fastest(functions)

        done = tune(calls, "cpu", workers=0, timer=timer)
        assert sizes == [0, 1, 2]
        assert done.interrupted
        assert stored() == done.entries
        assert len(done.entries) == 2 < len(found)

    def test_a_wrong_configuration_is_not_timed(self, monkeypatch):
        """One leaves a tile unwritten, another raises; neither is in what the timer gets."""
        _, found = layer_products((256, 48, 32))
        multiply = GemmCall.run
        first, second, *others = (config.name for config in found[0].candidates(CPU))

        def sometimes(gemm, args, config, out=None):
            result = multiply(gemm, args, config)
            if config.name == first:
                result[128:, :] = 0
            if config.name == second and out is not None:
                raise RuntimeError("misaligned address")
            return result

        monkeypatch.setattr(GemmCall, "run", sometimes)
        counts = []

        def timer(functions):
            counts.append(len(functions))
            return [1.0] * len(functions)

        done = tune([found[0].call], "cpu", workers=0, timer=timer)
        assert counts == [len(others)]
        assert done.entries[found[0].key].config == others[0]
        assert len(done.failed) == 2
        assert f"in {first}: AssertionError: SQNR" in done.failed[0]
        assert "misaligned address" in done.failed[1]

    @pytest.mark.parametrize("accumulation", ["fast", "precise"])
    def test_a_slightly_wrong_one_passes_as_fast_accumulation_only(self, monkeypatch, accumulation):
        """40 dB of noise: what fast accumulation leaves at a large K. Zeros fail there, too."""
        _, found = layer_products((256, 48, 32))
        call = found[0].call
        call = Call(call.op, (*call.args[:-2], accumulation, False))
        multiply = GemmCall.run

        def noisy(gemm, args, config, out=None):
            result = multiply(gemm, args, config).float()
            return (result + 0.01 * result.std() * torch.randn_like(result)).to(torch.bfloat16)

        monkeypatch.setattr(GemmCall, "run", noisy)
        done = tune([call], "cpu", workers=0, timer=last_is_fastest)
        assert bool(done.entries) == (accumulation == "fast")
        assert bool(done.failed) == (accumulation == "precise")
        monkeypatch.setattr(GemmCall, "run", lambda gemm, args, config, out=None: torch.zeros(256, 48).bfloat16())
        done = tune([call], "cpu", workers=0, timer=last_is_fastest, force=True)
        assert done.entries == {}
        assert all("required" in line or "none of" in line for line in done.failed)

    @pytest.mark.parametrize("seconds", [float("nan"), 0.0, -1.0])
    def test_times_that_are_none_are_not_kept(self, seconds):
        calls, found = layer_products(SHAPES[0])
        done = tune(calls, "cpu", workers=0, timer=lambda fs: [seconds] * len(fs))
        assert stored() == done.entries == {}
        assert len(done.failed) == len(found)

    def test_one_product_that_fails_does_not_cost_the_others(self):
        calls, found = layer_products(*SHAPES)
        timed = []

        def timer(functions):
            timed.append(functions)
            if len(timed) == 1:
                raise torch.OutOfMemoryError("out of memory")
            return last_is_fastest(functions)

        done = tune(calls, "cpu", workers=0, timer=timer)
        assert len(done.entries) == len(found) - 1
        assert len(done.failed) == 1
        assert "out of memory" in done.failed[0]

    @pytest.mark.parametrize("recipe", QUANTIZED)
    def test_operands_are_normal_data_of_the_recorded_layout(self, recipe):
        _, found = layer_products((64, 48, 32), recipe=recipe)
        for product in found:
            args = product.operands(CPU)
            assert Call.of(product.call.op, tuple(args)) == product.call
            values = args[0].float()
            assert values.unique().numel() > 20

    def test_a_call_with_a_list_of_tensors(self):
        op, (out, *args) = next((op, args) for op, args in SAMPLES if op is ops.quantize_shards)
        # Other tests have the sample, too.
        args = (out.clone(), *args)
        with Recorder() as recorder:
            op(*args)
        (call,) = recorder.calls
        assert call == Call.of("quantize_shards", args)
        assert [layout.shape for layout in call.args[1]] == [tuple(shard.shape) for shard in args[1]]
        assert [shard.shape for shard in call.arguments("cpu")[1]] == [shard.shape for shard in args[1]]

    def test_in_a_capture_and_without_a_gpu_or_a_timer(self, monkeypatch):
        with pytest.raises(ValueError, match="needs a CUDA GPU, or a timer"):
            tune([], "cpu")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            tune([], "cpu", timer=last_is_fastest)

    @pytest.mark.parametrize("device", [INTERPRETER])
    def test_on_a_gpu_the_named_configuration_is_launched(self, device):
        """The kernel itself, in the interpreter."""
        _, (product, *_) = layer_products((33, 24, 70))
        args = product.operands(torch.device(device))
        config = product.candidates(CPU)[-1]
        out = torch.full((33, 24), torch.nan, dtype=torch.bfloat16)
        assert gemms._LAUNCHES[product.call.op](*args, config=config, out=out) is out
        assert_matmul_close(out, product.expected(args), torch.bfloat16)


def test_a_gpu_without_an_index_is_the_current_one(monkeypatch):
    """Workers are told which one."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert hardware.with_index("cuda") == torch.device("cuda", 3)
    assert hardware.with_index("cuda:1") == torch.device("cuda", 1)
    assert hardware.with_index("cpu") == CPU


@pytest.mark.gpu
class TestOnGpu:
    def test_times_are_of_the_functions(self):
        x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        small, large = measure.cuda_seconds([lambda: x[:512] @ x, lambda: x @ x], rounds=5)
        assert 4 * small < large < 0.1

    def test_times_are_not_those_of_the_host(self):
        x = torch.randn(1024, device="cuda")

        def from_a_slow_host():
            end = time.perf_counter() + 2e-4
            while time.perf_counter() < end:
                pass
            x.mul_(1.0)

        assert measure.cuda_seconds([from_a_slow_host], rounds=5)[0] < 5e-5
