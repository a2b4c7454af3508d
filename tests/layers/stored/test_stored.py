"""Weights that are stored in 8 bits: the bits of a plain model of the same values, at half of the memory."""

import copy
import functools
import os
import pickle

import pytest
import torch
from cases import QUANTIZED, cpu_and_cuda
from mixtures import model_of
from stored_layers import (
    EXPERTS_KIND,
    LINEARS,
    MXFP4,
    call,
    check_bits,
    codes_of,
    each_kind,
    reloaded,
    results,
    store,
    stored,
    stored_and_plain,
    weights_of,
)
from torch import nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

import tritonfp8
from tritonfp8 import Float8Linear, layers, recipes
from tritonfp8.layers.stored import StoredMatrices, StoredWeight, replace
from tritonfp8.specs.testing import assert_bitwise_equal

each_recipe = pytest.mark.parametrize("name", [*QUANTIZED, MXFP4])


@cpu_and_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_recipe
def test_a_stored_model_is_the_plain_model_of_its_values(name, dtype, device):
    check_bits(LINEARS, name, dtype, device)


@each_kind
@each_recipe
def test_under_autocast(name, kind):
    model, plain = stored_and_plain(kind, name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (results(each, each, kind.inputs(torch.float32)) for each in (model, plain))
    # Experts give tokens back in the dtype that they came in.
    assert ours[0].dtype == (torch.float32 if kind.has_experts else torch.bfloat16)
    assert_bitwise_equal(ours, theirs)


@each_kind
@each_recipe
def test_in_one_graph(name, kind):
    # Else what ran before counts towards the limit of recompilations.
    torch._dynamo.reset()
    model, plain = stored_and_plain(kind, name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(results(compiled, model, kind.inputs()), results(plain, plain, kind.inputs()))


@each_kind
@cpu_and_cuda
def test_through_inductor(device, kind):
    torch._dynamo.reset()
    model, inputs = stored(kind, "rowwise", device=device), kind.inputs(device=device)
    # A GELU between two layers would be rounded otherwise.
    model = model[0] if kind is LINEARS else model
    with torch.no_grad():
        assert_bitwise_equal([torch.compile(model, fullgraph=True)(*inputs)], [model(*inputs)])


@each_recipe
def test_values_are_exact_and_a_second_rounding_changes_nothing(name):
    weight = stored(LINEARS, name)[0].weight
    values = weight.dequantize()
    assert_bitwise_equal([values.float()], [tritonfp8.dequantize(weight.quantized, dtype=torch.float32)])
    assert_bitwise_equal([layers.stored.store(values, weight.spec).dequantize()], [values])


@each_kind
def test_the_state_dict_has_plain_values_and_loads_everywhere(kind):
    model, plain, other = stored(kind, "rowwise"), kind.made(), kind.made().requires_grad_(False)
    state = reloaded(model.state_dict(), weights_only=True)
    assert {type(x) for x in state.values()} == {torch.Tensor}
    assert {x.dtype for x in state.values()} == {torch.bfloat16}
    plain.load_state_dict(state)
    assert_bitwise_equal([p.detach() for p in weights_of(plain)], [p.dequantize() for p in weights_of(model)])
    for parameter in other.parameters():
        parameter.zero_()
    store(kind, other, "rowwise", weight_storage="quantized")
    assert not call(other, kind).any()
    for assign in (False, True):
        other.load_state_dict(state, assign=assign)
        assert {type(p) for p in weights_of(other)} == {kind.stored_type}
        assert_bitwise_equal([call(other, kind)], [call(model, kind).detach()])
    owner, key = kind.first(other)
    before = getattr(owner, key)._qdata
    setattr(owner, key, nn.Parameter(getattr(owner, key).dequantize() * 2))
    assert type(getattr(owner, key)) is kind.stored_type
    assert_bitwise_equal([getattr(owner, key)._qdata], [before])


@each_kind
def test_copies_keep_the_codes_and_a_cast_changes_the_dtype_to_compute_in(kind):
    model = stored(kind, "blockwise").requires_grad_(False)
    expected, before = call(model, kind), [x.clone() for x in codes_of(model)]
    sent = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), reloaded(model, weights_only=False), model.to("cpu"), sent):
        assert {type(p) for p in weights_of(other)} == {kind.stored_type}
        assert_bitwise_equal([call(other, kind)], [expected])
    weight = weights_of(model)[0]
    assert weight.detach()._qdata is weight._qdata
    assert codes_of(copy.deepcopy(model))[0].data_ptr() != weight._qdata.data_ptr()
    model.float()
    assert {p.dtype for p in weights_of(model)} == {torch.float32}
    assert_bitwise_equal(codes_of(model), before)
    assert call(model, kind, torch.float32).dtype == torch.float32
    model.half()
    with pytest.raises(ValueError, match=r"the dtype of a weight that is stored in 8 bits .* must be one of torch.bf"):
        model.state_dict()
    assert_bitwise_equal(codes_of(model.float()), before)
    assert all(p.is_meta for p in weights_of(model.to("meta")))


def test_others_may_read_the_values():
    weight, (x,) = stored(LINEARS, "rowwise")[0].weight, LINEARS.inputs()
    values = weight.dequantize()
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, values))
    assert torch.equal(x @ weight.t(), x @ values.t())
    assert torch.equal(nn.functional.embedding(torch.tensor([3, 0]), weight), values[[3, 0]])
    assert torch.equal(torch.empty_like(values).copy_(weight), values)


@each_kind
@pytest.mark.parametrize(
    "use", [lambda weight: weight.add_(1), lambda weight: weight.unbind()], ids=["a write", "several views"]
)
def test_any_other_use_is_an_error_and_changes_nothing(use, kind):
    weight = weights_of(stored(kind, "rowwise"))[0]
    before = weight.dequantize()
    message = r"does not work on a weight that is stored in 8 bits.*dequantize\(\)"
    with pytest.raises(NotImplementedError, match=message):
        use(weight)
    assert torch.equal(weight.dequantize(), before)


def test_the_report_says_what_it_saves():
    report = store(LINEARS, LINEARS.made(), "tensorwise")
    assert report.stored_bytes == (2 * (200 * 136 + 4), 2 * LINEARS.elements)
    assert "weights are stored in 8 bits: 0.1 MiB in place of 0.1 MiB" in str(report)
    assert report.converted["0"].name == "tensorwise_stored"
    assert report.converted["0"].output.rhs.scale_rounding == "pow2"
    assert tritonfp8.convert(LINEARS.made(), "tensorwise").stored_bytes is None


@each_kind
def test_a_model_that_was_trained_converted_is_stored_later(kind):
    model = kind.of_recipe("tensorwise")
    report = store(kind, model, "rowwise")
    assert {recipe.name for recipe in report.already.values()} == {"tensorwise_stored"}
    assert {type(weight) for weight in weights_of(model)} == {kind.stored_type}
    assert kind.first(model)[0].recipe.name == "tensorwise_stored"
    now, before = report.stored_bytes
    assert now < 0.51 * before
    codes = codes_of(model)
    store(kind, model, "rowwise")
    assert all(a is b for a, b in zip(codes_of(model), codes, strict=True))


@each_kind
def test_recipes_with_the_same_weights_are_swapped_and_others_refused(kind):
    module = stored(kind, "rowwise")
    owner, model = kind.first(module)[0], nn.ModuleDict({"it": module})
    tritonfp8.swap_recipe(model, "rowwise_hp_grad_weight")
    assert owner.recipe.name == "rowwise_hp_grad_weight"
    with pytest.raises(ValueError, match="the weight of it.* is stored as e4m3 rowwise.*convert the model again"):
        tritonfp8.swap_recipe(model, "blockwise")
    assert owner.recipe.name == "rowwise_hp_grad_weight"
    owner.recipe = recipes.get("blockwise")
    with pytest.raises(ValueError, match="is stored as e4m3 rowwise.*and its recipe reads e4m3 128x128"):
        call(module, kind)


def test_revert_gives_plain_weights_of_the_values():
    model, (x,) = stored(LINEARS, "rowwise"), LINEARS.inputs()
    values = model[0].weight.dequantize()
    assert tritonfp8.revert(model) == ["0", "2"]
    assert type(model[0]) is nn.Linear
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, values)
    assert not model[0]._state_dict_hooks
    assert not model[0]._load_state_dict_pre_hooks
    assert torch.equal(model(x), functools.reduce(lambda x, layer: layer(x), model, x))


@each_kind
def test_quantize_weights_once_has_nothing_to_do(kind):
    model = stored(kind, "rowwise")
    expected, owner = results(model, model, kind.inputs()), kind.first(model)[0]
    with tritonfp8.quantize_weights_once(model):
        assert not (owner.cached_weights if kind.has_experts else owner.cached_weight is not None)
        assert_bitwise_equal(results(model, model, kind.inputs()), expected)


def test_inspect_and_verify_read_stored_weights():
    found = []
    for each in stored_and_plain(LINEARS, "rowwise"):
        with tritonfp8.monitor(each, every=1, thresholds=()) as stats:
            call(each, LINEARS)
            stats.step()
        found.append({k: v for k, v in stats.to_dict()[0]["0"]["weight"].items() if k != "scale_min"})
    assert found[0] == found[1]
    assert "e4m3 x e4m3" in str(tritonfp8.verify(stored(LINEARS, "rowwise"), *LINEARS.inputs()))


@each_kind
def test_an_exported_program_holds_codes(tmp_path, kind):
    model, path = stored(kind, "rowwise"), tmp_path / "stored.pt2"
    inputs = kind.inputs()
    with torch.no_grad():
        torch.export.save(torch.export.export(model, inputs), path)
        found = torch.export.load(path)
        assert_bitwise_equal([found.module()(*inputs)], [model(*inputs)])
    assert os.path.getsize(path) < 2 * kind.elements
    decomposed = found.run_decompositions()
    shapes = [x.shape for x in decomposed.state_dict.values() if x.dtype == torch.float8_e4m3fn]
    assert {weight.shape for weight in weights_of(model)} <= {*shapes}
    gemm = torch.ops.tritonfp8.scaled_grouped_matmul if kind.has_experts else torch.ops.tritonfp8.scaled_matmul
    assert len(decomposed.graph.find_nodes(op="call_function", target=gemm.default)) == 2


@each_recipe
def test_a_conv1d_is_stored_as_the_linear_layer_that_it_is(name):
    conv, linear = Conv1D(136, 200).bfloat16(), nn.Linear(200, 136).bfloat16()
    with torch.no_grad():
        conv.weight.normal_(generator=torch.Generator().manual_seed(0))
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    found, (x,) = [], LINEARS.inputs()
    x.requires_grad_()
    for layer in (conv, linear):
        store(LINEARS, layer, name)
        out = layer(x)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, layer.bias])])
    assert tuple(conv.weight.shape) == (200, 136)
    assert_bitwise_equal([conv.weight.quantized.qdata], [linear.weight.quantized.qdata])
    values = conv.weight.dequantize()
    assert torch.equal(values, linear.weight.dequantize().t())
    assert_bitwise_equal(*found)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal([compiled(x).detach()], [conv(x).detach()])
    state = conv.state_dict()
    assert torch.equal(state["weight"], values)
    for assign in (False, True):
        conv.load_state_dict(state, assign=assign)
        assert torch.equal(conv.weight.dequantize(), values)
    tritonfp8.revert(conv)
    assert type(conv) is Conv1D
    assert torch.equal(conv.weight, values)


def tied(model):
    model[2] = nn.Linear(200, 136)
    model[2].weight = model[0].weight
    return model


def parametrized(model):
    tritonfp8.convert(model, "rowwise")
    parametrizations.weight_norm(model[0])
    return model


def mixture(change=lambda model: model):
    return lambda model: change(model_of("mixtral", torch.bfloat16))


TRAINED, FROZEN = {"weight_storage": "quantized"}, {"mode": "inference"}
BF16_EXPERTS = {**FROZEN, "recipe": {"*.experts": "bf16", "*": "rowwise"}}


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda model: model, TRAINED, "the weight of 0 requires a gradient and is torch.bfloat16.*call model.float"),
        (lambda model: model.half(), {}, "0, 2: its weight is torch.float16: cast the model"),
        (tied, {}, "0, 2: its weight is shared by 0.weight, 2.weight: leave them out by filter="),
        (parametrized, {}, "0: its weight is computed"),
        (lambda model: model.to("meta"), {}, "0, 2: its weight is on the meta device: load the model first"),
        (lambda model: model, {"mode": "serve"}, "mode must be one of 'training', 'inference'; got 'serve'"),
        (lambda model: model, {"weight_storage": "fp8"}, "weight_storage must be one of 'parameters', 'quantized'"),
        (mixture(lambda model: model.half()), FROZEN, "its weight is torch.float16: cast the model"),
        (mixture(), BF16_EXPERTS, "experts: recipe 'bf16' computes the output in high precision: leave the layer out"),
    ],
)
def test_what_cannot_be_stored_is_an_error_and_nothing_is_converted(change, options, message):
    model = change(LINEARS.made())
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        tritonfp8.convert(model, **{"recipe": "rowwise", **(options or {"mode": "inference"})})
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("name", sorted(set(recipes.names()) - set(QUANTIZED)))
def test_a_recipe_without_a_quantized_weight_is_refused(name):
    with pytest.raises(ValueError, match=f"recipe {name!r} computes the output in high precision"):
        store(LINEARS, LINEARS.made(), name)


@pytest.mark.parametrize(
    ("kind", "place", "message"),
    [
        (LINEARS, (replace, "store"), "storing the weight of 2 failed. The 1 layers before it have plain weights"),
        (EXPERTS_KIND, (StoredMatrices, "of"), "storing the weight of .* failed"),
    ],
)
def test_a_failure_in_the_middle_leaves_plain_weights(monkeypatch, kind, place, message):
    model, calls, real = kind.made(), [], getattr(*place)

    def fails(*args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(*args)

    before = [type(module) for module in model.modules()]
    monkeypatch.setattr(*place, fails)
    with pytest.raises(RuntimeError, match=message):
        store(kind, model, "rowwise")
    assert [type(module) for module in model.modules()] == before
    assert {type(weight) for weight in model.parameters()} == {nn.Parameter}


def test_a_layer_made_by_hand_takes_a_stored_weight():
    layer = Float8Linear(200, 136, dtype=torch.bfloat16, recipe="rowwise")
    layer.weight = nn.Parameter(layers.stored.store(layer.weight, layer.recipe.output.rhs), requires_grad=False)
    assert type(layer.weight) is StoredWeight
    assert call(layer, LINEARS).shape == (33, 136)
