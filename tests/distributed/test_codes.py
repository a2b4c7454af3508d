"""Transposes from codes in parallel: the bits of one process, and one operand on the wire."""

from dataclasses import replace

import pytest
import torch
from cases import normal
from fsdp_cases import Setup, build, compare_operands, step_of, tokens_of, train
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from tp_cases import Recorder, check_layer, made_mesh, on_mesh

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import Float8ColwiseParallel, count_collective_bytes, enable_float8_all_gather
from tritonfp8.functional import linear

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(2)]

NAMES = ["rowwise", "blockwise", "mxfp8"]
CODES = {name: recipes.get(name, transposed_from="codes") for name in NAMES}
EXACT = {name: recipes.get(name, backward="dequantized") for name in NAMES}
each_codes = pytest.mark.parametrize("how", CODES.values(), ids=CODES)
R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Of the input, the weight and the bias, and of the output.
PLACEMENTS = {
    "tokens, replicated weight": ([S0], [R], [R]),
    "colwise": ([R], [S0], [S0]),
    "colwise, sharded tokens": ([S0], [S0], [S0]),
    "rowwise": ([S1], [S1], [R]),
    "rowwise, scattered tokens": ([S1], [S1], [R], [S0]),
}


@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS)
def test_sharded_layers_have_the_bits_of_one_process(ranks, placements):
    ranks.run(2, check_layer, [*CODES.values(), *EXACT.values()], (300,), 96, 160, placements)


def gathers(mesh, how, needs_grad):
    """All-gathers of a layer's forward on a [2 x 128, 256] input with sharded tokens: (dtype, elements)."""
    x = on_mesh(normal(256, 256).bfloat16(), mesh, [S0])
    w = on_mesh(normal(64, 256, seed=1).bfloat16(), mesh, [S0])
    with Recorder() as seen:
        linear(x, w.requires_grad_(needs_grad), None, how)
    return [(dtype, n) for op, dtype, n in seen.sent if "gather" in op]


@each_codes
def test_tokens_are_sent_once_for_both_gemms(ranks, how):
    ((dtype, n),) = ranks.run(2, gathers, how, True)[0]
    assert dtype == torch.uint8
    # Of bf16, which sends two bytes an element.
    assert n <= 0.52 * 2 * 128 * 256


def gathers_of_backward(mesh, how):
    """All-gathers of the backward of a layer whose output [2 x 128, 256] is scattered: (dtype, elements)."""
    x = on_mesh(normal(256, 64).bfloat16(), mesh, [S1])
    w = on_mesh(normal(256, 64, seed=1).bfloat16(), mesh, [S1])
    out = linear(x, w, None, how, output_placements=[S0])
    assert out.placements == (S0,)
    with Recorder() as seen:
        out.to_local().sum().backward()
    return [(dtype, n) for op, dtype, n in seen.sent if "gather" in op]


@each_codes
def test_the_gradient_is_sent_once_for_both_gemms(ranks, how):
    ((dtype, n),) = ranks.run(2, gathers_of_backward, how)[0]
    assert dtype == torch.uint8
    assert n <= 0.52 * 2 * 128 * 256
    # Two operands of 8 bits take as many bytes as bf16.
    if how.name != "blockwise_codes":
        assert ranks.run(2, gathers_of_backward, replace(how, transposed_from="values"))[0] == [(torch.bfloat16, 2**15)]


@each_codes
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_the_gather_of_fsdp2_brings_the_operands_of_the_whole_weight(ranks, how, reshard, world):
    shapes = [(5, 40), (131, 42), (300, 200)]
    assert ranks.run(world, compare_operands, how, shapes, reshard, world == 2) == [([], len(shapes))] * world


@each_codes
@pytest.mark.parametrize("compile", ["", "block"])
def test_losses_with_the_gather_equal_those_without(ranks, how, compile):
    setup = Setup(how, reshard=False, compile=compile)
    on, off = (ranks.run(2, train, replace(setup, enabled=enabled), 2) for enabled in (True, False))
    assert on == off


def gathered_bytes(mesh, how):
    """Bytes that a step gathers of a weight of 256 x 1024, if one gather serves both passes; after a first step."""
    model = nn.Sequential(nn.Linear(1024, 256, bias=False, device=mesh.device_type))
    tritonfp8.convert(model, how)
    enable_float8_all_gather(model)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    x = torch.ones(2, 1024, requires_grad=True)
    model(x).sum().backward()
    with count_collective_bytes() as counted:
        model(x).sum().backward()
    return counted.bytes["all_gather"]


@each_codes
def test_one_gather_of_nk_bytes_serves_both_passes(ranks, how):
    assert max(ranks.run(2, gathered_bytes, how)) <= 1.04 * 256 * 1024
    # From values the recipes with two orientations gather both.
    if how.name != "blockwise_codes":
        values = replace(how, transposed_from="values")
        assert min(ranks.run(2, gathered_bytes, values)) >= 2 * 256 * 1024


def gather_under_tensor_parallelism(mesh, how):
    grid = made_mesh(mesh.device_type, (2, 2), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    tritonfp8.convert(model, how)
    enable_float8_all_gather(model)
    parallelize_module(model, grid["tp"], {"0": Float8ColwiseParallel()})
    fully_shard(model, mesh=grid["dp"])
    try:
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    except ValueError as error:
        return str(error)
    return ""


def test_the_gather_under_tensor_parallelism_is_refused(ranks):
    for found in ranks.run(4, gather_under_tensor_parallelism, CODES["rowwise"]):
        assert "transposed_from='values'" in found


def trained_after_an_evaluation(mesh, setup):
    """Losses of a step, an evaluation in inference mode, and a step: its buffers serve both."""
    model, _ = build(mesh, setup)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = [step_of(model, optimizer, setup)]
    with torch.inference_mode():
        model(tokens_of(0))
    return [*losses, step_of(model, optimizer, setup)]


@each_codes
def test_a_step_after_an_evaluation_in_inference_mode(ranks, how):
    setup = Setup(how, reshard=False)
    on, off = (ranks.run(2, trained_after_an_evaluation, replace(setup, enabled=enabled)) for enabled in (True, False))
    assert on == off
