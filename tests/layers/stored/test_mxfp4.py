"""Weights that are stored as MXFP4: 4.25 bits a weight, exact values, and who reads them."""

import copy
import pickle

import pytest
import torch
from cases import normal
from stored_layers import (
    EXPERTS_KIND,
    LINEARS,
    MXFP4,
    MXFP4_SPEC,
    call,
    codes_of,
    each_kind,
    reloaded,
    stored,
    weights_of,
)
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import tritonfp8
from tritonfp8 import QuantSpec, ops, recipes, reference
from tritonfp8.layers.linear import weight_source
from tritonfp8.layers.stored import MatricesShard, StoredWeight, stored_as_layer
from tritonfp8.reference import rounding_keys
from tritonfp8.specs import EXPANDED
from tritonfp8.specs.testing import assert_bitwise_equal

BLOCKS = QuantSpec("e4m3", (1, 32), "e8m0", "pow2")


def values_of(kind):
    """The values of the first weight before it is stored."""
    owner, name = kind.first(kind.made())
    return getattr(owner, name).detach()


@each_kind
def test_codes_are_the_reference_s_and_take_a_quarter(kind):
    values, weight = values_of(kind), weights_of(stored(kind, MXFP4))[0]
    codes = reference.quantize(values, *MXFP4_SPEC.args)
    assert_bitwise_equal([weight._qdata, weight._scale], list(codes))
    for dtype in (torch.bfloat16, torch.float32):
        expected = reference.dequantize(*codes, *MXFP4_SPEC.args, dtype)
        assert_bitwise_equal([weight.plain_values(dtype)], [expected])
    assert torch.equal(weight.dequantize().float(), reference.dequantize(*codes, *MXFP4_SPEC.args, torch.float32))
    assert (weight.shape, weight.dtype) == (values.shape, torch.bfloat16)
    big = StoredWeight.of(normal(64, 4096, dtype=torch.bfloat16), MXFP4_SPEC)
    # Behind them the scales that rows have when they are expanded.
    assert big.nbytes == 64 * 4096 * 4.25 / 8 + 64 * 4


@each_kind
def test_operands_are_exact(kind):
    weight = weights_of(stored(kind, MXFP4))[0]
    values = weight.dequantize().float()
    expanded = reference.expand_codes(weight._qdata, weight._scale, *MXFP4_SPEC.args)
    assert_bitwise_equal(list(weight.read_operand(EXPANDED, False)), list(expanded))
    assert weight.rows_rounded() == 0
    for spec in (EXPANDED, BLOCKS):
        found = weight.read_operand(spec, False)
        assert_bitwise_equal(reference.dequantize(*found, *spec.args, torch.float32), values)
        cast = reference.quantize_matrices if weight.ndim == 3 else reference.quantize
        assert_bitwise_equal(list(weight.read_operand(spec, True)), list(cast(values, *spec.args, True)))


def assert_scales_of_rows(weights):
    for weight in weights:
        expected, _ = reference.measure_rows(weight._qdata, weight._scale, *MXFP4_SPEC.args)
        assert_bitwise_equal(weight._row_scale, expected)


@each_kind
def test_every_write_finds_the_scales_of_rows_in_place(kind):
    model = stored(kind, MXFP4).requires_grad_(False)
    weight, *others = weights_of(model)
    assert_scales_of_rows([weight, *others])
    values = weight.dequantize()
    other = StoredWeight.of(values.flatten(0, -2) * 5.0, MXFP4_SPEC).dequantize().view(values.shape)
    kept, address = weight._row_scale, weight._row_scale.data_ptr()
    state = {key: x * 3.0 for key, x in model.state_dict().items()}
    writes = (
        lambda: weight.copy_(values * 2.0**9),
        lambda: weight.copy_(type(weight).of(values * 2.0**-9, MXFP4_SPEC, weight.is_transposed)),
        lambda: setattr(weight, "data", other),
        lambda: weight.overwrite(values * 2.0**3),
        lambda: weight.view(-1)[:32].fill_(2.0**20),
        lambda: weight.zero_(),
        lambda: model.load_state_dict(state),
    )
    for write in writes:
        before = weight._row_scale.clone()
        write()
        assert not torch.equal(weight._row_scale, before)
        assert weight._row_scale is kept
        assert kept.data_ptr() == address
        assert_scales_of_rows([weight, *others])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), reloaded(model, weights_only=False)):
        assert_scales_of_rows(weights_of(copied))
        assert weights_of(copied)[0]._row_scale.data_ptr() != address
    assert_scales_of_rows([weight.clone(), weight.float(), weight.mT])
    assert weight.detach()._row_scale is kept


@each_kind
def test_a_write_to_a_part_finds_the_scales_of_its_rows(kind):
    weight = weights_of(stored(kind, MXFP4))[0].requires_grad_(False)
    other = type(weight).of(weight.dequantize() * 64.0, MXFP4_SPEC, weight.is_transposed)
    for part, source in zip(weight.split(2), other.split(2), strict=True):
        part.detach().copy_(source)
    assert_bitwise_equal(list(weight._both()), list(other._both()))
    assert_bitwise_equal(weight._row_scale, other._row_scale)


@each_kind
def test_expanding_reads_the_scales_of_rows(kind, monkeypatch):
    weight = weights_of(stored(kind, MXFP4))[0].requires_grad_(False)
    expected = reference.expand_codes(weight._qdata, weight._scale, *MXFP4_SPEC.args)
    weight._row_scale.mul_(2.0)
    _, found = weight.read_operand(EXPANDED, False)
    assert_bitwise_equal(found, expected[1] * 2.0)
    parts = weight.as_shard()
    assert_bitwise_equal(list(parts.read_operand(EXPANDED, False)), list(expected))


@each_kind
def test_what_a_scale_a_row_rounds_is_counted_and_blocks_hold_it(kind):
    values = values_of(kind)
    values[..., 0, :32] *= 2.0**-20
    values[..., 3, 32:64] *= 2.0**20
    owner, name = kind.first(stored(kind, MXFP4))
    weight = stored_as_layer(owner, name, values, MXFP4_SPEC)
    assert weight.rows_rounded() == 2 * values[..., 0, 0].numel()
    found = weight.read_operand(BLOCKS, False)
    assert torch.equal(reference.dequantize(*found, *BLOCKS.args, torch.float32), weight.dequantize().float())
    found = weight.read_operand(EXPANDED, False)
    assert not torch.equal(reference.dequantize(*found, *EXPANDED.args, torch.float32), weight.dequantize().float())


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_a_linear_layer_gives_its_codes_to_the_gemm(recipe, monkeypatch):
    """Where the GEMM expands them; the bits are of codes that are expanded before, also of the gradient."""
    layer = tritonfp8.Float8Linear(96, 24, recipe=recipes.get(recipe), dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(StoredWeight.of(normal(24, 96, dtype=torch.bfloat16), MXFP4_SPEC), False)
    x = normal(5, 96, dtype=torch.bfloat16).requires_grad_()
    calls, function = [], ops.packed_matmul
    monkeypatch.setattr(ops, "packed_matmul", lambda *args: calls.append(args[3].dtype) or function(*args))
    out = layer(x)
    out.sum().backward()
    assert calls == [torch.uint8] * (recipe == "rowwise")
    found, x.grad = [out.detach(), x.grad], None
    monkeypatch.setattr(weight_source.PackedSource, "now", weight_source.CodesSource.now)
    out = layer(x)
    out.sum().backward()
    assert calls == [torch.uint8] * (recipe == "rowwise")
    assert_bitwise_equal(found, [out.detach(), x.grad])


def test_experts_give_their_codes_to_the_gemm(monkeypatch):
    """The bits are of codes that are expanded before."""
    module, calls = stored(EXPERTS_KIND, MXFP4).requires_grad_(False), []

    def multiply(a, a_scale, a_spec, b, b_scale, b_spec, offsets, bias, dtype, accumulation, batch_invariant, of_rows):
        calls.append(b.dtype)
        codes, scales = reference.expand_codes(b, b_scale, b_spec)
        assert_bitwise_equal(of_rows, scales)
        return ops.scaled_grouped_matmul(
            a, a_scale, a_spec, codes, scales, *EXPANDED.args, offsets, bias, dtype, accumulation, batch_invariant
        )

    expected = call(module, EXPERTS_KIND)
    monkeypatch.setattr(ops, "packed_grouped_matmul", multiply)
    assert_bitwise_equal(call(module, EXPERTS_KIND), expected)
    assert calls == [torch.uint8, torch.uint8]


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp4_weights"])
def test_a_compiled_layer_gives_its_codes_to_the_gemm(recipe):
    layer = tritonfp8.Float8Linear(96, 24, recipe=recipes.get(recipe), dtype=torch.bfloat16)
    layer.weight = torch.nn.Parameter(StoredWeight.of(normal(24, 96, dtype=torch.bfloat16), MXFP4_SPEC), False)
    x = normal(5, 96, dtype=torch.bfloat16).requires_grad_()
    graphs = []

    def backend(graph, inputs):
        graphs.append({node.target for node in graph.graph.nodes})
        return make_boxed_func(graph)

    compiled = torch.compile(layer, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    for scale in (1.0, 64.0):
        layer.weight.copy_(normal(24, 96, dtype=torch.bfloat16) * scale)
        found = []
        for each in (compiled, layer):
            out = each(x)
            found += [out.detach(), *torch.autograd.grad(out.sum(), x)]
        assert_bitwise_equal(found[:2], found[2:])
    assert ops.packed_matmul in graphs[0]
    gemm = tritonfp8.verify(layer, x).layers[""].gemms["output"]
    assert (gemm.op, gemm.dtype) == ("tritonfp8.packed_matmul", "e4m3 x e2m1")
    assert not {ops.expand_codes, ops.measure_rows} & set.union(*graphs)


def test_compiled_experts_give_their_codes_and_the_scales_of_rows_to_the_gemm():
    module, graphs = stored(EXPERTS_KIND, MXFP4).requires_grad_(False), []

    def backend(graph, inputs):
        assert ops.expand_codes not in {node.target for node in graph.graph.nodes}
        graphs.extend(node for node in graph.graph.nodes if node.target is ops.packed_grouped_matmul)
        return make_boxed_func(graph)

    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=backend))
    assert_bitwise_equal(call(compiled, EXPERTS_KIND), call(module, EXPERTS_KIND))
    assert [isinstance(node.args[-1], torch.fx.Node) for node in graphs] == [True, True]
    assert len(graphs[0].args) == len(ops.packed_grouped_matmul._schema.arguments)


@each_kind
def test_recipes_that_read_the_codes_are_swapped_and_others_refused(kind):
    module = stored(kind, MXFP4)
    owner, model = kind.first(module)[0], torch.nn.ModuleDict({"it": module})
    for name in ("mxfp8", "rowwise_hp_grad_weight", "rowwise"):
        tritonfp8.swap_recipe(model, name)
        assert owner.recipe.name == name
        call(module, kind).sum().backward()
    with pytest.raises(ValueError, match="the weight of it.* is stored as e2m1 1x32.*reads e4m3 128x128"):
        tritonfp8.swap_recipe(model, "blockwise")
    owner.recipe = recipes.get("blockwise")
    with pytest.raises(ValueError, match="is stored as e2m1 1x32.*and its recipe reads e4m3 128x128"):
        call(module, kind)


@each_kind
def test_copies_keep_the_codes(kind):
    model = stored(kind, MXFP4).requires_grad_(False)
    expected, before = call(model, kind), [x.clone() for x in codes_of(model)]
    sent = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), reloaded(model, weights_only=False), model.to("cpu"), sent):
        assert_bitwise_equal(codes_of(other), before)
        assert_bitwise_equal([call(other, kind)], [expected])
    other = stored(kind, MXFP4)
    for weight in weights_of(other):
        weight.copy_(torch.zeros_like(weight.dequantize()))
        assert not weight._qdata.any()
    for assign in (False, True):
        other.load_state_dict(reloaded(model.state_dict(), weights_only=True), assign=assign)
        assert_bitwise_equal(codes_of(other), before)
    model.float()
    assert {p.dtype for p in weights_of(model)} == {torch.float32}
    assert_bitwise_equal(codes_of(model), before)
    assert all(
        p.is_meta and p.shape == q.shape for p, q in zip(weights_of(model.to("meta")), weights_of(other), strict=True)
    )


def test_the_mean_of_many_roundings_is_the_value():
    """Of each value, also of the largest of a block, which the scale of the OCP rule would saturate."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-3], [1.0], [7.9], [3e4]])
    x[1, :32] = torch.linspace(-7.9, 7.9, 32)
    count, values = 4000, []
    for key in rounding_keys(0, torch.arange(count).double(), torch.zeros(count, dtype=torch.int64)):
        codes = reference.quantize(torch.zeros_like(x), *MXFP4_SPEC.args)
        reference.quantize_at_random(*codes, x, key, *MXFP4_SPEC.args, (0, 0))
        values.append(reference.dequantize(*codes, *MXFP4_SPEC.args, torch.float32).double())
    found = torch.stack(values)
    errors = found.std(0) / count**0.5
    # A value on the grid, or so near to it that none of the roundings left it.
    spacing = 2 * codes[1].float().repeat_interleave(32, 1)
    assert ((found.mean(0) - x)[errors == 0].abs() <= 10 / count * spacing[errors == 0]).all()
    z = ((found.mean(0) - x.double()) / errors)[errors > 0]
    assert len(z) > 200
    assert z.abs().max() < 4.5
    assert 0.8 < z.std() < 1.2
    # Neighbours on the grid, and no others.
    assert all(len(each.unique()) <= 2 for each in found.flatten(1).unbind(1))


def test_a_step_is_adamw_on_the_values_rounded_at_random():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    grad = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    qdata, scale = reference.quantize(weight, *MXFP4_SPEC.args)
    numbers = torch.tensor([0.99, 0.1, 0.99, 0.01, 0.05, 3.0, 1e-8])
    (key,) = rounding_keys(0, torch.ones(1), torch.zeros(1, dtype=torch.int64))
    before, m, v = reference.dequantize(qdata, scale, *MXFP4_SPEC.args, torch.float32), *torch.zeros(2, 6, 64)
    for at_random in (True, False):
        codes, moments = [qdata.clone(), scale.clone()], [m.clone(), v.clone()]
        ops.adamw(*codes, *moments, grad, numbers, key, *MXFP4_SPEC.args, [1, 32], [0, 0], at_random)
        expected = before * 0.99 - grad * 0.1 / ((grad * grad * 0.01).double().sqrt().float() * 3.0 + 1e-8) * 0.05
        wanted = [qdata.clone(), scale.clone()]
        if at_random:
            reference.quantize_at_random(*wanted, expected, key, *MXFP4_SPEC.args, (0, 0))
        else:
            reference.quantize_into(*wanted, expected, *MXFP4_SPEC.args)
        assert_bitwise_equal(codes, wanted)
        assert not torch.equal(codes[0], qdata)
    with pytest.raises(ValueError, match="quantize_at_random takes codes of several a byte; got e4m3 1x32"):
        ops.quantize_at_random(*reference.quantize(weight, *BLOCKS.args), weight, key, *BLOCKS.args, [0, 0])


OPTIMIZERS = {
    "ours": lambda params: tritonfp8.optim.AdamW(params, 2e-3, weight_decay=0.0),
    "ours, moments in 8 bits": lambda params: tritonfp8.optim.AdamW(params, 2e-3, weight_decay=0.0, moments="fp8"),
    "to nearest": lambda params: tritonfp8.optim.AdamW(params, 2e-3, weight_decay=0.0, rounding="nearest"),
    "torch's SGD": lambda params: torch.optim.SGD(params, 0.02),
    "torch's AdamW": lambda params: torch.optim.AdamW(params, 2e-3, weight_decay=0.0),
}


def trained_losses(optimizer, steps=150):
    """The first and the last losses of two layers that are codes of MXFP4, and the codes that changed."""
    torch.manual_seed(0)
    model, teacher = (nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2))
    tritonfp8.convert(model, "mxfp4_weights", weight_storage="quantized")
    assert {type(layer.weight) for layer in model if hasattr(layer, "weight")} == {StoredWeight}
    stepper, before, losses = OPTIMIZERS[optimizer](model.parameters()), [x.clone() for x in codes_of(model)], []
    # Biases would learn, too.
    for layer in (model[0], model[2]):
        layer.bias.requires_grad_(False)
    for _ in range(steps):
        x = torch.randn(256, 32)
        loss = (model(x) - teacher(x).detach()).square().mean()
        stepper.zero_grad()
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    for weight in (model[0].weight, model[2].weight):
        assert torch.equal(weight._row_scale, ops.measure_rows(*weight._as_operand(), *weight.spec.args)[0])
    is_same = [torch.equal(x, y) for x, y in zip(before, codes_of(model), strict=True)]
    return sum(losses[:10]) / 10, sum(losses[-10:]) / 10, is_same


@pytest.mark.filterwarnings("ignore:.*writes to weights that are stored in 8 bits")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_lowers_the_loss_by_rounding_at_random(optimizer):
    first, last, is_same = trained_losses(optimizer)
    if optimizer == "to nearest":
        # A step is less than half a code. Only the largest of a block may move, where its scale becomes smaller.
        assert last > 0.99 * first
        return
    assert not any(is_same)
    assert last < 0.7 * first


def test_masters_are_rounded_to_nearest():
    model = stored(LINEARS, MXFP4, torch.float32)
    model[0].weight.requires_grad_()
    before = model[0].weight.dequantize().detach()
    model(*LINEARS.inputs(torch.float32)).square().sum().backward()
    optimizer = tritonfp8.optim.with_masters(torch.optim.SGD)([model[0].weight], 0.1)
    expected = before - 0.1 * model[0].weight.grad
    optimizer.step()
    assert_bitwise_equal(list(model[0].weight._both()), list(reference.quantize(expected, *MXFP4_SPEC.args)))


@each_kind
def test_writes_to_frozen_weights_replace_all_values_or_are_refused(kind):
    weight = weights_of(stored(kind, MXFP4).requires_grad_(False))[0]
    before = weight.dequantize().detach()
    with torch.no_grad():
        for write in (lambda: weight.mul_(0.5), lambda: weight.lerp_(before, 0.5)):
            with pytest.raises(NotImplementedError, match=r"does not work on a weight that is stored.*dequantize\(\)"):
                write()
            assert torch.equal(weight.dequantize(), before)
        weight.requires_grad_().mul_(0.5)
        # A power of two of values on the grid is on the grid.
        assert torch.equal(weight.dequantize(), before * 0.5)
        weight.add_(1e-3)
        moved = (weight.dequantize() != before * 0.5).sum()
        assert 0 < moved < weight.numel() / 4
        weight.view(-1)[:32] = 3.0
        assert torch.equal(weight.dequantize().view(-1)[:32], torch.full((32,), 3.0, dtype=before.dtype))
        weight.fill_(0.5)
        assert torch.equal(weight.dequantize(), torch.full_like(before, 0.5))


def test_parts_are_cut_between_rows():
    weight = stored(LINEARS, MXFP4)[0].weight
    values, rows = weight.dequantize(), weight.detach().as_shard()
    assert_bitwise_equal([rows.dequantize()], [values])
    part = rows[3:70]
    assert (part.shape, part._qdata.shape) == ((67, 200), (67, 100))
    assert_bitwise_equal([part.dequantize()], [values[3:70]])
    assert_bitwise_equal(list(rows.read_operand(EXPANDED, False)), list(weight.read_operand(EXPANDED, False)))
    assert rows.new_zeros((5, 200)).shape == (5, 200)
    with pytest.raises(NotImplementedError, match="e2m1 1x32.*cut between rows only"):
        rows[:, 32:]
    experts = weights_of(stored(EXPERTS_KIND, MXFP4))[0]
    found = experts.detach().as_shard()[1:3]
    assert type(found) is MatricesShard
    assert_bitwise_equal([found.dequantize()], [experts.dequantize()[1:3]])
