"""convert(fuse=True): what is fused and what is not, that results stay, and that revert undoes it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from cases import llama, normal, tokens, with_head
from cast_counts import casts_of
from mlp import MLP
from torch import nn

import tritonfp8
from tritonfp8 import Float8Linear, convert, recipes, revert, swap_recipe
from tritonfp8.layers.fused.modules import Float8RMSNorm, Float8SwiGLU
from tritonfp8.layers.linear import QuantizedInput, is_fusable
from tritonfp8.testing import assert_bitwise_equal, sqnr

each_fusable = pytest.mark.parametrize("name", [name for name in recipes.names() if is_fusable(name)])
DECODER = [f"model.layers.{i}.{part}" for i in range(2) for part in ("input_layernorm", "post_attention_layernorm")]
MLPS = [f"model.layers.{i}.mlp" for i in range(2)]


def block(norm=None, mlp=MLP, **options):
    torch.manual_seed(0)
    return nn.Sequential(norm or nn.RMSNorm(64), mlp(**options), nn.RMSNorm(64), nn.Linear(64, 32))


def run(model, ids):
    """Loss and gradients."""
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def run_block(model, x):
    out = model(x)
    return out.detach(), *torch.autograd.grad(out, [*model.parameters()], torch.ones_like(out))


def structure(model):
    return {name: (type(m), {k for k in m.__dict__ if not k.startswith("_")}) for name, m in model.named_modules()}


class TestLlama:
    @each_fusable
    def test_computes_what_the_converted_model_does(self, name):
        """Forward to the bit. Gradients of norms and products differ in the last bit before they are quantized, which
        a few roundings to 8 bits amplify: they are as close to those of the model in high precision."""
        exact, plain, model = llama(), llama(), llama()
        convert(plain, name)
        report = convert(model, name, fuse=True)
        assert list(report.fused) == [*MLPS, *DECODER]
        assert list(report.not_fused) == ["model.norm"]
        (_, wanted), (expected, grads_of_plain), (loss, grads) = (run(m, tokens()) for m in (exact, plain, model))
        assert_bitwise_equal(loss, expected)
        for key, grad in grads.items():
            assert sqnr(grad, wanted[key]) > sqnr(grads_of_plain[key], wanted[key]) - 1, key

    def test_norms_and_mlps_quantize_themselves(self):
        """Of the inputs of linears only those of o_proj and lm_head are cast by ops for casts alone."""
        plain, model = llama(), llama()
        convert(plain, with_head("rowwise"))
        convert(model, with_head("rowwise"), fuse=True)
        ids = tokens()
        shapes = [(18, 64), (18, 176)]
        with torch.no_grad():
            fused, unfused = (
                [casts_of(lambda m=m: m(input_ids=ids, use_cache=False), shape)[0] for shape in shapes]
                for m in (model, plain)
            )
        assert fused == [2 + 1, 0]
        assert unfused == [2 * 3 + 1, 2]

    def test_is_the_same_model(self):
        model = llama()
        parameters, before, ids = dict(model.named_parameters()), structure(model), tokens()
        keys, expected = list(model.state_dict()), run(model, ids)
        report = convert(model, "rowwise", fuse=True)
        assert list(model.state_dict()) == keys
        assert all(parameters[name] is p for name, p in model.named_parameters())
        norm, mlp = model.model.layers[0].input_layernorm, model.model.layers[0].mlp
        assert (type(norm), norm.rounding, norm.eps) == (Float8RMSNorm, "normalized", norm.variance_epsilon)
        assert type(mlp) is Float8SwiGLU
        assert isinstance(norm(normal(2, 64)), QuantizedInput)
        assert set(revert(model)) == {*report.converted, *report.fused}
        assert structure(model) == before
        assert_bitwise_equal(run(model, ids), expected)

    def test_report(self):
        report = convert(llama(), "rowwise", fuse=True)
        assert report.fused["model.layers.0.mlp"] == "Float8SwiGLU, rowwise"
        assert report.fused["model.layers.0.input_layernorm"] == "Float8RMSNorm, rowwise"
        text = str(report)
        assert "not fused: it is not known that converted linears alone read it" in text
        assert "\n14 converted, 1 skipped, 6 fused, 1 not fused\n" in text
        assert "fused" not in str(convert(llama(), "rowwise"))

    def test_swap_recipe(self):
        model, other = llama(), llama()
        convert(model, "rowwise", fuse=True)
        convert(other, "blockwise", fuse=True)
        with pytest.raises(ValueError, match=r"layers.0.input_layernorm is fused.*'mxfp8', 'rowwise', 'rowwise'"):
            swap_recipe(model, {"*.q_proj": "mxfp8"})
        with pytest.raises(ValueError, match=r"layers.0.mlp is fused.*'rowwise', 'rowwise', 'mxfp8'"):
            swap_recipe(model, {"*.down_proj": "mxfp8"})
        assert {m.recipe.name for m in model.modules() if hasattr(m, "recipe")} == {"rowwise"}
        swap_recipe(model, "blockwise")
        assert_bitwise_equal(run(model, tokens()), run(other, tokens()))
        # Recipes in high precision run the plain formulas.
        swap_recipe(model, "bf16")
        loss, _ = run(model, tokens())
        assert loss == pytest.approx(run(llama(), tokens())[0].item(), rel=1e-5)

    def test_weights_once_and_copies(self):
        model = llama()
        convert(model, "blockwise", fuse=True)
        expected = run(model, tokens())
        with tritonfp8.quantize_weights_once(model):
            assert_bitwise_equal(run(model, tokens()), expected)
        twin = copy.deepcopy(model)
        assert_bitwise_equal(run(twin, tokens()), expected)
        revert(twin)
        assert_bitwise_equal(run(twin, tokens()), run(llama(), tokens()))

    @pytest.mark.parametrize("reentrant", [True, False])
    def test_gradient_checkpointing(self, reentrant):
        model = llama()
        convert(model, "rowwise", fuse=True)
        expected = run(model, tokens())
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        assert_bitwise_equal(run(model, tokens()), expected)

    def test_generates(self):
        model = llama()
        convert(model, "rowwise", fuse=True)
        out = model.generate(tokens(), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert out.shape == (2, 13)


def with_hook(path):
    def change(model):
        model.get_submodule(path).register_forward_hook(lambda *args: None)

    return change


def with_a_norm_in_two_places(model):
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm


def with_a_forward_of_its_own(model):
    model.model.layers[0].mlp.forward = lambda x: x


# What is done to a Llama, options of convert, and a module that stays with its reason.
STAYS = {
    "hook on a norm": (with_hook("model.layers.0.input_layernorm"), {}, "layers.0.input_layernorm", "hooks on it"),
    "hook on attention": (with_hook("model.layers.0.self_attn"), {}, "layers.0.input_layernorm", "hooks on it"),
    "hook on a reader": (with_hook("model.layers.0.self_attn.k_proj"), {}, "layers.0.input_layernorm", "hooks on it"),
    "hook inside": (with_hook("model.layers.1.mlp.down_proj"), {}, "layers.1.mlp", "has hooks"),
    "own forward": (with_a_forward_of_its_own, {}, "layers.0.mlp", "forward of its own"),
    "two places": (with_a_norm_in_two_places, {}, "layers.0.input_layernorm", "more than one place"),
    "filter": (
        lambda model: None, {"filter": lambda m, fqn: "v_proj" not in fqn}, "layers.0.input_layernorm",
        "a linear that reads it is not converted",
    ),
    "recipes": (
        lambda model: None, {"recipe": {"*.up_proj": "mxfp8", "*": "rowwise"}}, "layers.1.post_attention_layernorm",
        "the linears that read it follow different recipes",
    ),
    "recipes of an MLP": (
        lambda model: None, {"recipe": {"*.up_proj": "mxfp8", "*": "rowwise"}}, "layers.1.mlp", "different recipes"
    ),
    "high precision": (
        lambda model: None, {"recipe": "rowwise_hp_grad_weight"}, "layers.0.mlp", "keeps a GEMM in high precision"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STAYS)
def test_what_stays_says_why(case):
    change, options, name, reason = STAYS[case]
    model = llama()
    change(model)
    cls = type(model.get_submodule(f"model.{name}"))
    report = convert(model, **{"recipe": "rowwise", "fuse": True, **options})
    assert reason in report.not_fused[f"model.{name}"]
    assert type(model.get_submodule(f"model.{name}")) is cls
    if case != "own forward":
        assert torch.isfinite(run(model, tokens())[0])


class TestBlocks:
    @each_fusable
    def test_sequential(self, name):
        model, plain = block(), block()
        report = convert(model, name, fuse=True)
        convert(plain, name)
        assert list(report.fused) == ["1", "0", "2"]
        assert not report.not_fused
        assert model[0].rounding == "output"
        x = normal(33, 64)
        for actual, expected in zip(run_block(model, x), run_block(plain, x), strict=True):
            assert sqnr(actual, expected) > 25
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert_bitwise_equal(compiled(x), model(x))
        revert(model)
        assert_bitwise_equal(run_block(model, x), run_block(block(), x))

    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"bias": True}, "bias"),
            ({"activation": F.gelu}, "its forward is not"),
            ({"activation": nn.GELU()}, "its forward is not"),
            ({"activation": lambda x: F.silu(x) if x.sum() > 0 else x}, "its forward is not"),
        ],
        # Names that are the same in each process that collects them.
        ids=["bias", "gelu", "module", "branch"],
    )
    def test_other_mlps_stay(self, options, reason):
        model = block(**options)
        report = convert(model, "rowwise", fuse=True)
        assert reason in report.not_fused["1"]
        # What reads the norm before it is then not known; the norm before a linear is fused.
        assert {"0", "1"} == set(report.not_fused)
        assert type(model[0]) is nn.RMSNorm
        assert type(model[1].gate_proj) is Float8Linear
        model(normal(5, 64))

    def test_a_norm_without_weight_stays(self):
        report = convert(block(nn.RMSNorm(64, elementwise_affine=False)), "rowwise", fuse=True)
        assert report.not_fused == {"0": "it has no weight of one dim"}

    def test_a_subclass_of_a_norm_is_left_alone(self):
        class Norm(nn.RMSNorm):
            pass

        model = block(Norm(64))
        assert "0" not in convert(model, "rowwise", fuse=True).fused
        assert type(model[0]) is Norm
