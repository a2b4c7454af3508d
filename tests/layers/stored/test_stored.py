"""Weights that are stored in 8 bits: the bits of a plain model of the same values, at half of the memory."""

import copy
import functools
import io
import os
import pickle

import pytest
import torch
from cases import cpu_and_cuda, llama, tokens
from torch import nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

import tritonfp8
from tritonfp8 import Float8Linear, recipes
from tritonfp8.layers import stored
from tritonfp8.layers.stored import StoredWeight
from tritonfp8.specs.testing import assert_bitwise_equal

QUANTIZED = [name for name in recipes.names() if recipes.get(name).output.rhs is not None]
each_recipe = pytest.mark.parametrize("name", QUANTIZED)


def layers(dtype=torch.bfloat16, device="cpu"):
    torch.manual_seed(0)
    sizes = (200, 136), (136, 200)
    first, second = (nn.Linear(*size, dtype=dtype, device=device) for size in sizes)
    return nn.Sequential(first, nn.GELU(), second)


def stored_and_plain(name, dtype=torch.bfloat16, device="cpu"):
    """A model with stored weights, and a plain model of their values with the same recipe."""
    model = layers(dtype, device)
    tritonfp8.convert(model, name, mode="inference")
    plain = layers(dtype, device)
    tritonfp8.convert(plain, model[0].recipe)
    plain.load_state_dict(model.state_dict())
    for layer in (plain[0], plain[2]):
        layer.weight.requires_grad_(False)
    return model, plain


def results(call, model, x):
    """Output, and the gradients of the input and of the biases."""
    x = x.clone().requires_grad_()
    out = call(x)
    out.float().square().sum().backward()
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(grads) == 2
    for p in model.parameters():
        p.grad = None
    return [out.detach(), x.grad, *grads]


def data(dtype=torch.bfloat16, device="cpu"):
    return torch.randn(33, 200, generator=torch.Generator().manual_seed(1)).to(device, dtype)


@cpu_and_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_recipe
def test_a_stored_model_is_the_plain_model_of_its_values(name, dtype, device):
    model, plain = stored_and_plain(name, dtype, device)
    x = data(dtype, device)
    assert_bitwise_equal(results(model, model, x), results(plain, plain, x))
    for layer in (model[0], model[2]):
        assert type(layer.weight) is StoredWeight
        assert isinstance(layer.weight, nn.Parameter)
        assert layer.weight.nbytes <= 1.04 * layer.weight.numel()
        assert not layer.weight.requires_grad


@each_recipe
def test_under_autocast(name):
    model, plain = stored_and_plain(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (results(each, each, data(torch.float32)) for each in (model, plain))
    assert ours[0].dtype == torch.bfloat16
    assert_bitwise_equal(ours, theirs)


@each_recipe
def test_in_one_graph(name):
    # Else what ran before counts towards the limit of recompilations.
    torch._dynamo.reset()
    model, plain = stored_and_plain(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(results(compiled, model, data()), results(plain, plain, data()))


@cpu_and_cuda
def test_through_inductor(device):
    model, _ = stored_and_plain("rowwise", device=device)
    layer, x = model[0], data(device=device)
    with torch.no_grad():
        expected = layer(x)
        assert_bitwise_equal([torch.compile(layer, fullgraph=True)(x)], [expected])


@each_recipe
def test_values_are_exact_and_a_second_rounding_changes_nothing(name):
    model, _ = stored_and_plain(name)
    weight = model[0].weight
    values = weight.dequantize()
    q = weight.quantized
    assert_bitwise_equal([values.float()], [tritonfp8.dequantize(q, dtype=torch.float32)])
    again = stored.store(values, weight.spec)
    assert_bitwise_equal([again.dequantize()], [values])


def test_the_state_dict_has_plain_values_and_loads_everywhere():
    model, _ = stored_and_plain("rowwise")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert {type(x) for x in state.values()} == {torch.Tensor}
    assert {x.dtype for x in state.values()} == {torch.bfloat16}
    plain = layers()
    plain.load_state_dict(state)
    assert torch.equal(plain[0].weight, model[0].weight.dequantize())
    other = layers().requires_grad_(False)
    for parameter in other.parameters():
        parameter.zero_()
    tritonfp8.convert(other, "rowwise", weight_storage="quantized")
    assert not other(data()).any()
    for assign in (False, True):
        other.load_state_dict(state, assign=assign)
        assert type(other[0].weight) is StoredWeight
        assert_bitwise_equal([other(data())], [model(data())])


def test_copies_keep_the_codes():
    model, _ = stored_and_plain("blockwise")
    model.requires_grad_(False)
    expected = model(data())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    sent = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), model.to("cpu"), sent):
        assert type(other[0].weight) is StoredWeight
        assert_bitwise_equal([other(data())], [expected])
    assert model[0].weight.detach()._qdata is model[0].weight._qdata
    assert copy.deepcopy(model)[0].weight._qdata.data_ptr() != model[0].weight._qdata.data_ptr()


def test_a_cast_changes_the_dtype_to_compute_in_and_no_code():
    model, _ = stored_and_plain("rowwise")
    before = model[0].weight._qdata.clone()
    model.float()
    assert model[0].weight.dtype == torch.float32
    assert_bitwise_equal([model[0].weight._qdata], [before])
    assert model(data(torch.float32)).dtype == torch.float32
    model.half()
    with pytest.raises(ValueError, match=r"the dtype of a weight that is stored in 8 bits .* must be one of torch.bf"):
        model.state_dict()
    assert_bitwise_equal([model.float()[0].weight._qdata], [before])
    assert model.to("meta")[0].weight.device.type == "meta"


def test_others_may_read_the_values():
    model, _ = stored_and_plain("rowwise")
    weight, x = model[0].weight, data()
    values = weight.dequantize()
    assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, values))
    assert torch.equal(x @ weight.t(), x @ values.t())
    assert torch.equal(nn.functional.embedding(torch.tensor([3, 0]), weight), values[[3, 0]])
    out = torch.empty_like(values)
    out.copy_(weight)
    assert torch.equal(out, values)


@pytest.mark.parametrize(
    "use", [lambda weight: weight.add_(1), lambda weight: weight.unbind()], ids=["a write", "several views"]
)
def test_any_other_use_is_an_error_and_changes_nothing(use):
    model, _ = stored_and_plain("rowwise")
    before = model[0].weight.dequantize()
    with pytest.raises(
        NotImplementedError, match=r"does not work on a weight that is stored in 8 bits.*dequantize\(\)"
    ):
        use(model[0].weight)
    assert torch.equal(model[0].weight.dequantize(), before)


def test_the_report_says_what_it_saves():
    model = layers()
    report = tritonfp8.convert(model, "tensorwise", mode="inference")
    now, before = report.stored_bytes
    assert before == 2 * 2 * 200 * 136
    assert now == 2 * (200 * 136 + 4)
    assert "weights are stored in 8 bits: 0.1 MiB in place of 0.1 MiB" in str(report)
    assert report.converted["0"].name == "tensorwise_stored"
    assert report.converted["0"].output.rhs.scale_rounding == "pow2"
    assert tritonfp8.convert(layers(), "tensorwise").stored_bytes is None


def test_a_model_that_was_trained_converted_is_stored_later():
    model = layers()
    tritonfp8.convert(model, "tensorwise")
    report = tritonfp8.convert(model, "rowwise", mode="inference")
    assert [recipe.name for recipe in report.already.values()] == ["tensorwise_stored"] * 2
    assert [type(model[i].weight) for i in (0, 2)] == [StoredWeight] * 2
    assert model[0].recipe.name == "tensorwise_stored"
    codes = model[0].weight._qdata
    tritonfp8.convert(model, "rowwise", mode="inference")
    assert model[0].weight._qdata is codes


def test_recipes_with_the_same_weights_are_swapped_and_others_refused():
    model, _ = stored_and_plain("rowwise")
    tritonfp8.swap_recipe(model, "rowwise_hp_grad_weight")
    assert model[0].recipe.name == "rowwise_hp_grad_weight"
    with pytest.raises(ValueError, match="the weight of 0 is stored as e4m3 rowwise.*convert the model again"):
        tritonfp8.swap_recipe(model, "blockwise")
    assert model[0].recipe.name == "rowwise_hp_grad_weight"
    model[0].recipe = recipes.get("blockwise")
    with pytest.raises(ValueError, match="is stored as e4m3 rowwise.*and its recipe reads e4m3 128x128"):
        model(data())


def test_revert_gives_plain_weights_of_the_values():
    model, _ = stored_and_plain("rowwise")
    values = model[0].weight.dequantize()
    assert tritonfp8.revert(model) == ["0", "2"]
    assert type(model[0]) is nn.Linear
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, values)
    assert not model[0]._state_dict_hooks
    assert not model[0]._load_state_dict_pre_hooks
    assert torch.equal(model(data()), functools.reduce(lambda x, layer: layer(x), model, data()))


def test_quantize_weights_once_has_nothing_to_do():
    model, _ = stored_and_plain("rowwise")
    expected = results(model, model, data())
    with tritonfp8.quantize_weights_once(model):
        assert model[0].cached_weight is None
        assert_bitwise_equal(results(model, model, data()), expected)


def test_inspect_and_verify_read_stored_weights():
    model, plain = stored_and_plain("rowwise")
    found = []
    for each in (model, plain):
        with tritonfp8.monitor(each, every=1, thresholds=()) as stats:
            each(data())
            stats.step()
        found.append({k: v for k, v in stats.to_dict()[0]["0"]["weight"].items() if k != "scale_min"})
    assert found[0] == found[1]
    assert "e4m3 x e4m3" in str(tritonfp8.verify(model, data()))


def test_an_exported_program_holds_codes(tmp_path):
    model, _ = stored_and_plain("rowwise")
    with torch.no_grad():
        program = torch.export.export(model, (data(),))
        torch.export.save(program, tmp_path / "stored.pt2")
        found = torch.export.load(tmp_path / "stored.pt2")
        assert_bitwise_equal([found.module()(data())], [model(data())])
    assert os.path.getsize(tmp_path / "stored.pt2") < 2 * 2 * 200 * 136
    inner = {x.dtype for x in found.run_decompositions().state_dict.values()}
    assert torch.float8_e4m3fn in inner
    gemm = torch.ops.tritonfp8.scaled_matmul.default
    assert len(found.run_decompositions().graph.find_nodes(op="call_function", target=gemm)) == 2


def test_a_model_of_transformers_generates():
    model = llama(num_hidden_layers=1).bfloat16()
    report = tritonfp8.convert(model, "rowwise", mode="inference")
    assert "lm_head" in report.skipped
    plain = llama(num_hidden_layers=1).bfloat16()
    plain.load_state_dict(model.state_dict())
    tritonfp8.convert(plain, "rowwise")
    prompt = tokens()[:, :8]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


@each_recipe
def test_a_conv1d_is_stored_as_the_linear_layer_that_it_is(name):
    conv, linear = Conv1D(136, 200).bfloat16(), nn.Linear(200, 136).bfloat16()
    with torch.no_grad():
        conv.weight.normal_(generator=torch.Generator().manual_seed(0))
        linear.weight.copy_(conv.weight.t())
        linear.bias.copy_(conv.bias)
    for layer in (conv, linear):
        tritonfp8.convert(layer, name, mode="inference")
    assert tuple(conv.weight.shape) == (200, 136)
    assert_bitwise_equal([conv.weight.quantized.qdata], [linear.weight.quantized.qdata])
    values = conv.weight.dequantize()
    assert torch.equal(values, linear.weight.dequantize().t())
    found = [[*each] for each in ([], [])]
    for layer, into in zip((conv, linear), found, strict=True):
        x = data().requires_grad_()
        out = layer(x)
        out.float().square().sum().backward()
        into += [out.detach(), x.grad, layer.bias.grad]
    assert_bitwise_equal(*found)
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal([compiled(data()).detach()], [conv(data()).detach()])
    state = conv.state_dict()
    assert torch.equal(state["weight"], values)
    for assign in (False, True):
        conv.load_state_dict(state, assign=assign)
        assert torch.equal(conv.weight.dequantize(), values)
    tritonfp8.revert(conv)
    assert type(conv) is Conv1D
    assert torch.equal(conv.weight, values)


def test_save_pretrained_writes_the_values(tmp_path):
    model = llama(num_hidden_layers=1).bfloat16()
    tritonfp8.convert(model, "rowwise", mode="inference")
    model.save_pretrained(tmp_path)
    found = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    assert_bitwise_equal(list(found.values()), list(expected.values()))
    assert any(type(p) is StoredWeight for p in model.parameters())


def trained(model):
    return {"weight_storage": "quantized"}, model


def half_precision(model):
    return {"mode": "inference"}, model.half()


def tied(model):
    model[2] = nn.Linear(200, 136)
    model[2].weight = model[0].weight
    return {"mode": "inference"}, model


def parametrized(model):
    tritonfp8.convert(model, "rowwise")
    parametrizations.weight_norm(model[0])
    return {"mode": "inference"}, model


def on_meta(model):
    return {"mode": "inference"}, model.to("meta")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (trained, "the weight of 0 requires a gradient and is torch.bfloat16.*call model.float"),
        (half_precision, "0: its weight is torch.float16: cast the model"),
        (tied, "0: its weight is shared by 0.weight, 2.weight: leave them out by filter="),
        (parametrized, "0: its weight is computed"),
        (on_meta, "0: its weight is on the meta device: load the model first"),
        (lambda model: ({"mode": "serve"}, model), "mode must be one of 'training', 'inference'; got 'serve'"),
        (lambda model: ({"weight_storage": "fp8"}, model), "weight_storage must be one of 'parameters', 'quantized'"),
    ],
)
def test_what_cannot_be_stored_is_an_error_and_nothing_is_converted(case, message):
    options, model = case(layers())
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        tritonfp8.convert(model, "rowwise", **options)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.parametrize("name", sorted(set(recipes.names()) - set(QUANTIZED)))
def test_a_recipe_without_a_quantized_weight_is_refused(name):
    with pytest.raises(ValueError, match=f"recipe {name!r} computes the output in high precision"):
        tritonfp8.convert(layers(), name, mode="inference")


def test_a_failure_in_the_middle_leaves_plain_weights(monkeypatch):
    from tritonfp8.layers.stored import replace

    model, calls = layers(), []

    def fails(weight, spec, is_transposed):
        calls.append(weight)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return stored.store(weight, spec)

    monkeypatch.setattr(replace, "store", fails)
    with pytest.raises(RuntimeError, match="storing the weight of 2 failed. The 1 layers before it have plain weights"):
        tritonfp8.convert(model, "rowwise", mode="inference")
    assert [type(model[i]) for i in (0, 2)] == [nn.Linear] * 2
    assert [type(model[i].weight) for i in (0, 2)] == [nn.Parameter] * 2


def test_a_layer_made_by_hand_takes_a_stored_weight():
    layer = Float8Linear(200, 136, dtype=torch.bfloat16, recipe="rowwise")
    layer.weight = nn.Parameter(stored.store(layer.weight, layer.recipe.output.rhs), requires_grad=False)
    assert layer(data()).shape == (33, 136)
