"""A warm-up tunes the GEMMs of groups that a step launches.

On the CPU every configuration runs the reference.
"""

import contextlib
import dataclasses

import pytest
import torch
from cases import QUANTIZED
from tuned import stored
from warmup_jobs import last_is_fastest

from tritonfp8 import tuning
from tritonfp8.compat import hardware
from tritonfp8.functional import grouped_linear
from tritonfp8.launch import gemms
from tritonfp8.warmup import measure
from tritonfp8.warmup.gemms import GROUPED_MATMUL, GroupedGemmCall, gemm_of
from tritonfp8.warmup.measure import tune
from tritonfp8.warmup.record import Call, Recorder

CPU = torch.device("cpu")
TOKENS, EXPERTS, N, K = 160, 3, 48, 64

pytestmark = pytest.mark.usefixtures("home")


def calls_of(recipe, dtype=torch.bfloat16, n=N):
    """The ops of forward and backward of the experts of one layer."""
    with Recorder() as recorder:
        x = torch.randn(TOKENS, K, dtype=dtype, requires_grad=True)
        weight = torch.randn(EXPERTS, n, K, dtype=dtype, requires_grad=True)
        offsets = torch.tensor([20, 100, TOKENS], dtype=torch.int32)
        grouped_linear(x, weight, offsets, recipe=recipe).sum().backward()
    return list(recorder.calls)


def grouped(calls):
    return [call for call in calls if call.op == GROUPED_MATMUL]


@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("has_tma", [False, True])
def test_the_key_is_that_of_the_launch(monkeypatch, recipe, has_tma):
    asked = []

    def choose(gemm, device, copy_engine):
        asked.append(tuning.grouped_key(gemm, copy_engine))
        raise LookupError

    abilities = dataclasses.replace(hardware.CPU, has_tma=has_tma)
    monkeypatch.setattr("tritonfp8.launch.gemms.grouped.choose_grouped", choose)
    monkeypatch.setattr(hardware, "abilities", lambda device: abilities)
    # No row of 20 elements begins at a multiple of 16 bytes: TMA cannot address it.
    calls = grouped([*calls_of(recipe), *calls_of(recipe, torch.float32), *calls_of(recipe, n=20)])
    for call in calls:
        with pytest.raises(LookupError):
            gemms.scaled_grouped_matmul(*call.arguments("cpu"))
        assert asked[-1] == gemm_of(call, CPU).key
    assert len(calls) >= 6
    assert {at.kind.groups for at in asked} >= {"rows"}
    assert {at.kind.copy_engine for at in asked} == ({True, False} if has_tma and recipe != "mxfp8" else {False})


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_the_fastest_is_chosen_saved_and_not_measured_again(recipe):
    calls = calls_of(recipe)
    done = tune(calls, "cpu", workers=0, timer=last_is_fastest)
    assert done.failed == ()
    wanted = {gemm_of(call, CPU).key for call in grouped(calls)}
    assert set(done.entries) == wanted
    assert stored() == done.entries
    for call in grouped(calls):
        gemm = gemm_of(call, CPU)
        assert gemm.chosen(CPU) is gemm.candidates(CPU)[-1]
    again = tune(calls, "cpu", workers=0, timer=pytest.fail)
    assert (again.entries, again.skipped) == ({}, len(wanted))


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_operands_are_normal_data_of_the_recorded_layout_in_groups_of_different_sizes(recipe):
    for call in grouped(calls_of(recipe)):
        args = gemm_of(call, CPU).operands(CPU)
        assert Call.of(call.op, tuple(args)) == call
        named = dict(zip(call.named(), args, strict=True))
        assert named["a"].float().unique().numel() > 20
        sizes = named["offsets"].diff(prepend=torch.zeros(1, dtype=torch.int32))
        assert sizes.sum() == TOKENS
        assert sizes.unique().numel() == EXPERTS


def test_a_wrong_configuration_is_not_timed(monkeypatch):
    """It leaves the rows of the last group unwritten, as launches may that read wrong offsets."""
    call = grouped(calls_of("rowwise"))[0]
    run, first = GroupedGemmCall.run, gemm_of(call, CPU).candidates(CPU)[0].name

    def sometimes(gemm, args, config, out=None):
        result = run(gemm, args, config)
        if config.name == first:
            result[100:] = torch.nan
        return result

    monkeypatch.setattr(GroupedGemmCall, "run", sometimes)
    done = tune([call], "cpu", workers=0, timer=last_is_fastest)
    assert len(done.failed) == 1
    sizes = [TOKENS, EXPERTS, N, K]
    assert done.failed[0].startswith(f"epilogue precise rows {sizes} in {first}: AssertionError")
    assert all(at.kind.groups == "rows" for at in done.entries)


def test_empty_calls_are_left_out():
    with Recorder() as recorder, contextlib.suppress(RuntimeError):
        grouped_linear(torch.randn(0, K), torch.randn(2, N, K), torch.zeros(2, dtype=torch.int32), recipe="rowwise")
    assert grouped(recorder.calls)
    assert measure.distinct_gemms(list(recorder.calls), CPU) == []


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_configurations_are_compiled_checked_and_timed(recipe):
    with Recorder() as recorder:
        x = torch.randn(1024, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        weight = torch.randn(4, 512, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        offsets = torch.tensor([100, 100, 700, 1024], dtype=torch.int32, device="cuda")
        grouped_linear(x, weight, offsets, recipe=recipe).sum().backward()
    done = tune(list(recorder.calls), workers=2)
    assert done.failed == ()
    assert {at.kind.groups for at in done.entries} == {"rows", "columns"}
    assert {at.experts for at in done.entries} == {4}
