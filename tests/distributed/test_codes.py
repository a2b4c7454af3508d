"""Transposes from codes in parallel: the bits of one process, and one operand on the wire."""

from dataclasses import replace

import covering
import fsdp_tp_cases
import pytest
import torch
from cases import CODES, normal
from fsdp_cases import BFLOAT16, Setup, both_operands, build, compare_operands, step_of, tokens_of, train
from fsdp_models import Linears, initialize
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from tp_cases import Recorder, check_layer, on_mesh

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather, scales
from tritonfp8.distributed.shard_layout import largest_blocks
from tritonfp8.functional import linear

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(2)]

EXACT = {name: recipes.get(name, backward="dequantized") for name in CODES}
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
    sent = ranks.run(2, gathers, how, True)[0]
    assert sent[0] == (torch.uint8, 128 * 256)
    # Of bf16, which sends two bytes an element.
    assert sum(dtype.itemsize * n for dtype, n in sent) <= 0.52 * 2 * 128 * 256


def ops_of_colwise(mesh, how):
    """Our ops in forward and backward of a layer whose weight is sharded by out features."""
    x, w = on_mesh(normal(64, 96), mesh, [R]), on_mesh(normal(128, 96, seed=1), mesh, [S0])
    with Recorder() as seen:
        linear(x, w, None, how).to_local().sum().backward()
    return seen.ops


def test_the_cast_of_a_shard_finds_the_amaxes_of_its_transpose(ranks):
    """Values of codes in float32 would be four times as large as the codes."""
    found = ranks.run(2, ops_of_colwise, CODES["rowwise"])[0]
    assert "quantize_with_amax" in found
    assert "dequantize" not in found


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
    sent = ranks.run(2, gathers_of_backward, how)[0]
    assert sent[0] == (torch.uint8, 128 * 256)
    assert sum(dtype.itemsize * n for dtype, n in sent) <= 0.52 * 2 * 128 * 256
    # Two operands of 8 bits take as many bytes as bf16.
    if how.name != "blockwise_codes":
        assert ranks.run(2, gathers_of_backward, replace(how, transposed_from="values"))[0] == [(torch.bfloat16, 2**15)]


@each_codes
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("world", [2, 3])
def test_the_gather_of_fsdp2_brings_the_operands_of_the_whole_weight(ranks, how, reshard, world):
    shapes = [(5, 40), (131, 42), (300, 200)]
    assert ranks.run(world, compare_operands, how, shapes, reshard, world == 2) == [([], len(shapes))] * world


OPTIONS = {
    "eager": {"reshard": False},
    "compiled": {"reshard": False, "compile": "block"},
    "recompute": {"recompute": "yes"},
    "selective recompute": {"recompute": "selective"},
    "accumulated": {"accumulate": 2},
}


@each_codes
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_losses_with_the_gather_equal_those_without(ranks, how, options):
    setup = Setup(how, **options)
    on, off = (ranks.run(2, train, replace(setup, enabled=enabled), 2) for enabled in (True, False))
    assert on == off


def sharded(mesh, how, shape, reshard, dim=None, sizes=(2, 2)):
    """A model of one layer that is gathered in 8 bits; ``dim``: which tensor parallelism shards, on a mesh of two."""
    model = initialize(Linears([shape])).to(mesh.device_type)
    tritonfp8.convert(model, how, filter=lambda module, name: True)
    enable_float8_all_gather(model)
    if dim is not None:
        mesh, tp = fsdp_tp_cases.mesh_of(mesh, sizes)
        style = RowwiseParallel(input_layouts=R) if dim else ColwiseParallel(output_layouts=R)
        parallelize_module(model, tp, {"layers.0": style})
    fully_shard(model.layers[0], mesh=mesh, mp_policy=BFLOAT16, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
    return model


def gathered_bytes(mesh, how, **options):
    """Bytes that a step gathers of a weight of 256 x 1024, if one gather serves both passes; after a first step."""
    model = sharded(mesh, how, (256, 1024), False, **options)
    x = torch.ones(2, 1024, requires_grad=True)
    model(x).sum().backward()
    with count_collective_bytes() as counted:
        model(x).sum().backward()
    return counted.bytes["all_gather"]


@each_codes
def test_one_gather_of_nk_bytes_serves_both_passes(ranks, how):
    assert max(ranks.run(2, gathered_bytes, how)) <= 1.04 * 256 * 1024
    # With tensor parallelism half of the weight, and the output.
    assert max(ranks.run(4, gathered_bytes, how, dim=0)) <= 1.04 * 256 * 1024 / 2
    # From values the recipes with two orientations gather both.
    if how.name != "blockwise_codes":
        values = replace(how, transposed_from="values")
        assert min(ranks.run(2, gathered_bytes, values)) >= 2 * 256 * 1024


HP_GRAD_WEIGHT = recipes.get("rowwise_hp_grad_weight", transposed_from="codes")
ALL_CODES = [CODES["rowwise"], CODES["mxfp8"], HP_GRAD_WEIGHT, CODES["blockwise"]]
WITH_TENSOR_PARALLELISM = {
    "plain": {},
    "compiled": {"compiled": 1, "attention": False},
    "recompute": {"recompute": "yes"},
    "replicas": {"sizes": (2, 1, 2)},
    "compiled, no reshard": {"compiled": 1, "attention": False, "reshard": False},
    "no reshard": {"reshard": False},
    "one rank of FSDP2": {"sizes": (1, 4)},
    "DTensor outputs": {"local": False},
    "frozen": {"frozen": "gate"},
    "evaluated": {"evaluates": True},
    "accumulated, quantized once": {"micro": 2, "once": True},
}
# Options that change no bit of the run without the 8-bit gather on a CPU.
CHANGE_NOTHING = {"reshard", "recompute", "once"}


@pytest.mark.parametrize(
    ("how", "option"),
    covering.each(ALL_CODES, list(WITH_TENSOR_PARALLELISM)),
    ids=lambda value: getattr(value, "name", value),
)
def test_losses_under_tensor_parallelism(ranks, how, option):
    options = {"sizes": (2, 2), "recipe": how, "steps": 2, "layers": 1, **WITH_TENSOR_PARALLELISM[option]}
    off = {key: value for key, value in options.items() if key not in CHANGE_NOTHING}
    on = ranks.run(4, fsdp_tp_cases.train, enabled=True, timeout=240, **options)
    assert on == ranks.run(4, fsdp_tp_cases.train, enabled=False, timeout=240, **off)


class WeightsOfGemms(TorchDispatchMode):
    """Records the second operand of each quantized GEMM that has not the tokens in it."""

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.found = tokens, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.tritonfp8.scaled_matmul.default and args[3].shape[1] != self.tokens:
            self.found.append((args[3].clone(), args[4].clone()))
        return func(*args, **(kwargs or {}))


def operands_under_tensor_parallelism(mesh, sizes, how, shape, dim, reshard, scaling):
    """Whether the GEMMs of a layer, sharded along ``dim`` and by FSDP2, read parts of the operands of one process."""
    model = sharded(mesh, how, shape, reshard, dim, sizes)
    weight = initialize(Linears([shape])).to(mesh.device_type, torch.bfloat16).layers[0].weight.detach()
    with scales(scaling), WeightsOfGemms(3) as seen:
        model(torch.randn(3, shape[1], requires_grad=True)).sum().backward()
    tp = model.layers[0].weight.device_mesh["tp"]
    start, blocks = -(-shape[dim] // tp.size()) * tp.get_local_rank(), largest_blocks(how)[1:]
    found = [
        (tritonfp8.Quantized(*pair, expected.spec), expected)
        for pair, expected in zip(seen.found, both_operands(weight, how), strict=True)
    ]
    return [
        fsdp_tp_cases.part_of(*pair, dim ^ transposed, start, start % blocks[dim])
        for transposed, pair in enumerate(found)
    ]


@pytest.mark.parametrize(
    ("how", "shape", "dim", "sizes", "reshard", "scaling"),
    covering.pairs(
        ALL_CODES, [(300, 200), (131, 68), (40, 131), (70, 300)], [0, 1], [(2, 2), (1, 4)], [True, False],
        ["global", "local"],
    ),
    ids=lambda value: getattr(value, "name", str(value)),
)  # fmt: skip
def test_operands_under_tensor_parallelism(ranks, how, shape, dim, sizes, reshard, scaling):
    """A gathered weight has the scales of the global weight, also where the others are local."""
    found = ranks.run(4, operands_under_tensor_parallelism, sizes, how, shape, dim, reshard, scaling)
    assert found == [[True, True]] * 4


def reduced_amaxes(mesh, how):
    """Numbers of the amaxes of a weight [140, 150], cut at row 70, that ranks reduce in forward, and in backward."""
    model = sharded(mesh, how, (140, 150), True, 0)
    with Recorder() as forward:
        loss = model(torch.ones(3, 150, requires_grad=True)).sum()
    with Recorder() as backward:
        loss.backward()
    return [[n for _, dtype, n in seen.sent if dtype == torch.int32] for seen in (forward, backward)]


# The gradient of the output has 3 rows; row 70 lies in one block of mxfp8 of each column, and row.
@pytest.mark.parametrize("name", ["rowwise", "mxfp8"])
def test_ranks_talk_about_the_transpose_of_a_weight_in_forward(ranks, name):
    assert ranks.run(4, reduced_amaxes, CODES[name]) == [[[150], [3]]] * 4


def local_part(mesh, how):
    """The error of a layer that computes with the part of a weight that is here, without its DTensor."""
    model = sharded(mesh, how, (64, 64), False, 0)
    x = torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True)
    model(x.float()).sum().backward()
    model(x.float())
    out = linear(x, model.layers[0].weight.to_local(), None, how)
    with pytest.raises(ValueError, match="lie on several ranks"):
        out.sum().backward()


def test_the_transpose_of_a_local_part_is_refused(ranks):
    ranks.run(4, local_part, CODES["rowwise"])


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
