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

import tritonfp8
from tritonfp8 import QuantSpec, ops, recipes, reference
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
    assert big.nbytes == 64 * 4096 * 4.25 / 8


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
