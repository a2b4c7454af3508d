"""Gradients reduced in 8 bits under FSDP2: few bytes, no bias, and the result of the reference."""

import functools
import math

import pytest
import torch
from fsdp_cases import Setup, build, digest, load, save, step_of, tokens_of
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tritonfp8 import reference
from tritonfp8.distributed import count_collective_bytes, enable_float8_reduce_scatter
from tritonfp8.distributed.gradients.reduce_scatter import PairwiseReduceScatter

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]

SUM, AVG = torch.distributed.ReduceOp.SUM, torch.distributed.ReduceOp.AVG


def gradient_of(rank, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(size, generator=generator) * torch.exp(2 * torch.randn(size, generator=generator))
    return x.to(dtype)


def reduced(mesh, size, dtype, is_quantized, op=SUM, poisoned=False):
    """The part of a rank of the reduced gradients, each ``[ranks * size]``."""
    if not isinstance(op, torch.distributed.ReduceOp.RedOpType):
        op = torch.distributed._make_nccl_premul_sum(op)
    device = mesh.device_type
    x = gradient_of(mesh.get_rank(), mesh.size() * size, dtype)
    if poisoned and mesh.get_rank() == 1:
        x[0] = math.inf
    out = torch.full((size,), -7.0, dtype=dtype, device=device)
    PairwiseReduceScatter(is_quantized)(out, x.to(device), mesh.get_group(), op)
    return out.cpu()


def expected(world, size, dtype, is_quantized, factor):
    """The parts of all ranks, by one process."""
    each = [gradient_of(rank, world * size, dtype) for rank in range(world)]
    sent = [reference.quantize_parts(x, world, i) if is_quantized else x.view(world, -1) for i, x in enumerate(each)]
    outs = torch.empty(world, size, dtype=dtype)
    for rank, out in enumerate(outs):
        reference.sum_in_pairs(out, torch.stack([x[rank] for x in sent]), factor)
    return list(outs)


@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize(("world", "size", "dtype"), [(2, 300, torch.float32), (3, 77, torch.bfloat16)], ids=str)
def test_parts_are_added_in_pairs_of_ranks(ranks, world, size, dtype, is_quantized):
    for op, factor in ((SUM, 1.0), (AVG, 1 / world), (0.125, 0.125)):
        found = ranks.run(world, reduced, size, dtype, is_quantized, op)
        for got, want in zip(found, expected(world, size, dtype, is_quantized, factor), strict=True):
            assert torch.equal(got, want)


def test_a_gradient_that_is_not_finite(ranks):
    first, second = ranks.run(2, reduced, 300, torch.float32, True, poisoned=True)
    assert first[:128].isnan().all()
    assert first[128:].isfinite().all()
    assert second.isfinite().all()


def gradients(mesh, setup, enabled, factor=None):
    """Whole gradients after one step's backwards, and the calls of collectives."""
    model, _ = build(mesh, setup)
    if enabled:
        enable_float8_reduce_scatter(model)
    if factor is not None:
        for module in (*model.layers, model):
            module.set_gradient_divide_factor(factor)
    with count_collective_bytes() as traffic:
        for micro in range(setup.accumulate):
            model.set_requires_gradient_sync(micro == setup.accumulate - 1)
            model(tokens_of(micro)).backward()
    found = {name: p.grad.full_tensor().float().cpu() for name, p in model.named_parameters() if p.grad is not None}
    return found, traffic.calls


SMALL = Setup("rowwise", False)
OPTIONS = {
    "plain": SMALL,
    "gathered": Setup("mxfp8", True),
    "accumulated": Setup("rowwise", False, accumulate=2),
    "compiled": Setup("rowwise", False, compile="block"),
    "offloaded": Setup("rowwise", False, offload=True),
    "kept": Setup("rowwise", False, reshard=False),
}


def relative_error(found, wanted):
    """Of all gradients together."""
    assert set(found) == set(wanted)
    difference = sum((found[name] - wanted[name]).square().sum() for name in wanted)
    return (difference / sum(x.square().sum() for x in wanted.values())).sqrt().item()


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_are_near_float32(ranks, option):
    """Shards are uneven over three ranks. A code's step is an eighth, so an element is off by some percent."""
    (found, _), (wanted, _) = (ranks.run(3, gradients, OPTIONS[option], enabled)[0] for enabled in (True, False))
    assert 1e-3 < relative_error(found, wanted) < 0.05


def test_hsdp(ranks):
    setup = Setup("rowwise", False, copies=2)
    (found, calls), (wanted, _) = (ranks.run(4, gradients, setup, enabled)[0] for enabled in (True, False))
    assert 1e-3 < relative_error(found, wanted) < 0.05
    assert calls["all_reduce"] == calls["all_to_all"] == 3


def test_a_divide_factor(ranks):
    run = functools.partial(ranks.run, 2, gradients, SMALL, True)
    (halved, _), (eighth, _) = run()[0], run(factor=8.0)[0]
    # The same codes: both factors are powers of two.
    assert all(torch.equal(eighth[name] * 4, halved[name]) for name in halved)


class Wide(nn.Module):
    """A block whose gradients are no tails."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 300)

    def forward(self, x):
        return self.layer(x).square().mean()


def bytes_of_a_step(mesh, dtype, enabled):
    torch.manual_seed(0)
    model = Wide()
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, dtype))
    if enabled:
        enable_float8_reduce_scatter(model)
    with count_collective_bytes() as traffic:
        model(gradient_of(mesh.get_rank(), 4 * 256).view(4, 256)).backward()
    return dict(traffic.bytes)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.26), (torch.bfloat16, 0.51)], ids=str)
def test_bytes_of_a_reduction(ranks, dtype, most):
    found, plain = (ranks.run(2, bytes_of_a_step, dtype, enabled)[0] for enabled in (True, False))
    assert "reduce_scatter" not in found
    assert "all_to_all" not in plain
    assert 0 < found["all_to_all"] <= most * plain["reduce_scatter"]


def trained(mesh, setup, steps):
    model, _ = build(mesh, setup)
    enable_float8_reduce_scatter(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [step_of(model, optimizer, setup) for _ in range(steps)], digest(model)


def test_a_run_has_the_same_bits_again(ranks):
    """Nothing but the gradients makes the random bits."""
    assert ranks.run(2, trained, SMALL, 3) == ranks.run(2, trained, SMALL, 3)


def half_trained(mesh, folder, saving):
    with patched_build():
        return (save if saving else load)(mesh, folder, SMALL)


def patched_build():
    """Have the cases of checkpoints reduce in 8 bits."""
    from unittest import mock

    import fsdp_cases

    def build_and_enable(mesh, setup):
        model, report = build(mesh, setup)
        enable_float8_reduce_scatter(model)
        return model, report

    return mock.patch.object(fsdp_cases, "build", build_and_enable)


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(ranks, tmp_path):
    before, losses, *_ = ranks.run(2, half_trained, str(tmp_path), True)[0]
    assert ranks.run(2, half_trained, str(tmp_path), False)[0] == (before, losses)


def errors(mesh):
    """Messages of wrong calls, on one rank."""
    found = []
    replicated = nn.Linear(4, 4)
    replicate(replicated, mesh=mesh)
    comm, group = PairwiseReduceScatter(True), mesh.get_group()
    out, x = torch.empty(4), torch.ones(4 * mesh.size())
    for call in (
        lambda: enable_float8_reduce_scatter(3),
        lambda: enable_float8_reduce_scatter(nn.Linear(4, 4)),
        lambda: enable_float8_reduce_scatter(replicated),
        lambda: comm(out, x, group, torch.distributed.ReduceOp.MAX),
        lambda: comm(out, x, group, SUM, async_op=True),
        lambda: comm(out.double(), x.double(), group, SUM),
    ):
        try:
            call()
        except (TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_wrong_calls(ranks):
    for found in ranks.run(2, errors):
        for message, part in zip(
            found,
            (
                "TypeError",
                "ValueError: enable_float8_reduce_scatter needs a model that FSDP2 shards: call fully_shard before",
                "is replicated and not sharded",
                "ValueError: gradients are reduced by SUM, AVG or PREMUL_SUM; got",
                "ValueError: a reduce-scatter in pairs of ranks is not asynchronous",
                "TypeError: gradients are quantized from torch.float32",
            ),
            strict=True,
        ):
            assert part in message


@pytest.mark.multigpu
@pytest.mark.parametrize("is_quantized", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_gpus(gpus, dtype, is_quantized):
    """The bits of the reference, by NCCL, also of parts that fill many tiles."""
    for size in (300, 200_001):
        found = gpus.run(2, reduced, size, dtype, is_quantized, AVG)
        for got, want in zip(found, expected(2, size, dtype, is_quantized, 0.5), strict=True):
            assert torch.equal(got, want)
