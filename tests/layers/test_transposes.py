"""Transposed operands from codes, and a backward that dequantizes: each layer has the bits of its definition."""

import pytest
import torch
from cases import CUDA, normal

import tritonfp8
from tritonfp8 import functional, recipes, reference
from tritonfp8.specs.testing import assert_bitwise_equal

NAMES = ["rowwise", "blockwise", "mxfp8"]
each_name = pytest.mark.parametrize("name", NAMES)
M, N, K = 140, 72, 96


def uneven(*shape, seed):
    """Rows and columns of other magnitudes: the scales of both orientations differ, and some codes are subnormal."""
    x = normal(*shape, seed=seed)
    rows, columns = normal(shape[0], 1, seed=seed + 1), normal(1, shape[1], seed=seed + 2)
    return (x * torch.exp(3 * rows) * torch.exp(2 * columns)).bfloat16()


def leaves(device="cpu"):
    x, weight, bias = uneven(M, K, seed=0), uneven(N, K, seed=3) * 0.1, normal(N, seed=6, dtype=torch.bfloat16)
    return [t.to(device).requires_grad_() for t in (x, weight, bias)]


def run(function, *tensors, grad=None):
    """The output and the gradients of the tensors."""
    out = function(*tensors)
    grad = uneven(*out.shape, seed=9).to(out.device) if grad is None else grad
    return [out.detach(), *torch.autograd.grad(out, tensors, grad)]


def definition(x, weight, name, dequantized=False):
    """``grad_input`` and ``grad_weight`` from the casts of the reference."""
    how = recipes.get(name)
    grad = uneven(M, N, seed=9)
    specs = {"x": (how.output.lhs, how.grad_weight.rhs), "w": (how.output.rhs, how.grad_input.rhs)}
    specs["g"] = how.grad_input.lhs, how.grad_weight.lhs
    codes = {
        key: reference.quantize(t.detach(), *specs[key][0].args) for key, t in (("x", x), ("w", weight), ("g", grad))
    }
    if dequantized:
        values = {key: reference.dequantize(*codes[key], *specs[key][0].args, torch.bfloat16) for key in "xw"}
        return [grad @ values["w"], grad.t() @ values["x"]]
    t = {key: (*reference.transpose_codes(*codes[key], *first.args, *second.args), *second.args)
         for key, (first, second) in specs.items()}  # fmt: skip
    grad_input = reference.scaled_matmul(*codes["g"], *specs["g"][0].args, *t["w"])
    return [grad_input, reference.scaled_matmul(*t["g"], *t["x"])]


@each_name
def test_gradients_are_those_of_the_definition(name):
    x, weight, bias = leaves()
    how = recipes.get(name, transposed_from="codes")
    found = run(lambda *t: functional.linear(*t, how), x, weight, bias)
    expected = definition(x, weight, name)
    assert_bitwise_equal(found[1:3], expected)
    of_values = run(lambda *t: functional.linear(*t, name), x, weight, bias)
    assert_bitwise_equal(found[0], of_values[0])
    # The data tell the two apart.
    assert not torch.equal(found[2], of_values[2])


@each_name
def test_a_backward_that_dequantizes_multiplies_what_forward_multiplied(name):
    x, weight, bias = leaves()
    how = recipes.get(name, backward="dequantized")
    found = run(lambda *t: functional.linear(*t, how), x, weight, bias)
    assert_bitwise_equal(found[1:3], definition(x, weight, name, dequantized=True))


def ways(how):
    """Ways to compute one layer, by name."""

    def compiled(*t):
        function = torch.compile(lambda x, w, b: functional.linear(x * 1, w, b, how), backend="aot_eager")
        return function(*t)

    def cached(x, w, b):
        kept = functional.quantize_weight(w.detach(), how)
        return functional.linear(x, w, b, how, quantized_weight=kept)

    def shared(x, w, b):
        first, second = functional.SharedInput.group(2)
        functional.linear(x, w, b, how, shared_input=first)
        return functional.linear(x, w, b, how, shared_input=second)

    return {"compiled": compiled, "cached": cached, "shared": shared}


RECIPES = {
    **{f"{name} codes": recipes.get(name, transposed_from="codes") for name in NAMES},
    **{f"{name} dequantized": recipes.get(name, backward="dequantized") for name in NAMES},
    "rowwise_hp_grad_weight codes": recipes.get("rowwise_hp_grad_weight", transposed_from="codes"),
    "tensorwise dequantized": recipes.get("tensorwise", backward="dequantized"),
}
each_recipe = pytest.mark.parametrize("how", RECIPES.values(), ids=RECIPES)


@each_recipe
@pytest.mark.parametrize("way", ways(None))
def test_every_way_has_the_bits_of_the_eager_layer(how, way):
    tensors = leaves()
    expected = run(lambda *t: functional.linear(*t, how), *tensors)
    assert_bitwise_equal(run(ways(how)[way], *tensors), expected)


@each_recipe
def test_transforms_have_the_bits_of_the_eager_layer(how):
    tensors = leaves()
    grad = uneven(M, N, seed=9)
    expected = run(lambda *t: functional.linear(*t, how), *tensors, grad=grad)
    found = torch.func.grad(lambda *t: (functional.linear(*t, how) * grad).sum(), argnums=(0, 1, 2))(
        *[t.detach() for t in tensors]
    )
    assert_bitwise_equal(list(found), expected[1:])


@each_recipe
@pytest.mark.parametrize("only", [0, 1])
def test_a_gradient_by_itself_has_the_same_bits(how, only):
    """A transpose is made from codes also where no GEMM reads these untransposed."""
    tensors = leaves()
    expected = run(lambda *t: functional.linear(*t, how), *tensors)[1 + only]
    x, weight, bias = (t.detach() for t in tensors)
    given = [x, weight][only].requires_grad_()
    out = functional.linear(x, weight, bias, how)
    assert_bitwise_equal(torch.autograd.grad(out, given, uneven(M, N, seed=9))[0], expected)


@each_recipe
def test_groups_have_the_bits_of_layers(how):
    offsets = torch.tensor([30, 30, M], dtype=torch.int32)
    x, weights = uneven(M, K, seed=0).requires_grad_(), torch.stack([uneven(N, K, seed=s) for s in (20, 30, 40)])
    weights = weights.requires_grad_()
    out, grad_x, grad_weights = run(lambda x, w: functional.grouped_linear(x, w, offsets, None, how), x, weights)
    grad, start = uneven(M, N, seed=9), 0
    for i, end in enumerate(offsets.tolist()):
        rows, weight = x.detach()[start:end].requires_grad_(), weights.detach()[i].requires_grad_()
        if end > start:
            expected = run(lambda *t: functional.linear(*t, None, how), rows, weight, grad=grad[start:end])
            assert_bitwise_equal([out[start:end], grad_x[start:end], grad_weights[i]], expected)
        start = end


@each_recipe
def test_quantize_weights_once_and_accumulation_keep_the_bits(how):
    model = torch.nn.Sequential(torch.nn.Linear(K, 80), torch.nn.GELU(), torch.nn.Linear(80, N)).bfloat16()
    tritonfp8.convert(model, how)
    batches = [uneven(M, K, seed=s) for s in (0, 50)]

    def grads():
        model.zero_grad()
        for batch in batches:
            model(batch).float().square().mean().backward()
        return [p.grad for p in model.parameters()]

    expected = grads()
    with tritonfp8.quantize_weights_once(model):
        assert_bitwise_equal(grads(), expected)


def test_what_cannot_be_made_from_codes_is_refused():
    with pytest.raises(ValueError, match="codes.*powers of two"):
        tritonfp8.Recipe(
            "uneven",
            output=recipes.Gemm(tritonfp8.QuantSpec(), tritonfp8.QuantSpec()),
            grad_input=recipes.Gemm(*[tritonfp8.QuantSpec("e4m3", (1, -1), "fp32", "none")] * 2),
            transposed_from="codes",
        )
    row, wide = (tritonfp8.QuantSpec(f, (1, -1), "fp32", "pow2") for f in ("e4m3", "e5m2"))
    gemm = recipes.Gemm(row, row)
    with pytest.raises(ValueError, match="own format"):
        tritonfp8.Recipe("wide", gemm, gemm, recipes.Gemm(wide, wide), "codes")
    with pytest.raises(ValueError, match="quantizes input untransposed"):
        tritonfp8.Recipe("none", recipes.Gemm(), recipes.Gemm(), gemm, "codes")
    with pytest.raises(ValueError, match="must be one of 'values', 'codes'"):
        tritonfp8.Recipe("none", gemm, gemm, gemm, "bytes")
    with pytest.raises(ValueError, match="backward='dequantized'.*'bf16', which has none"):
        recipes.get("bf16", backward="dequantized")
    with pytest.raises(ValueError, match="backward must be one of"):
        recipes.get("rowwise", backward="bf16")


@pytest.mark.parametrize("how", RECIPES.values(), ids=RECIPES)
def test_recipes_survive_files_and_say_what_they_do(how):
    assert tritonfp8.Recipe.from_toml(how.to_toml()) == how
    assert tritonfp8.Recipe.from_json(how.to_json()) == how
    assert "codes" in str(how) or "dequantized" in str(how)


@pytest.mark.gpu
@each_recipe
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_gpu_has_the_gradients_of_a_cpu(how, backend):
    """Casts to the bit; so gradients differ by the order of sums only."""
    expected = run(lambda *t: functional.linear(*t, how), *leaves())
    function = torch.compile(lambda x, w, b: functional.linear(x * 1, w, b, how), backend=backend)
    found = run(function, *leaves(CUDA.values[0]))
    for a, b in zip(found, expected, strict=True):
        assert tritonfp8.specs.testing.sqnr(a.cpu(), b) > 45
