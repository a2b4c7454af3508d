"""Experts that follow a recipe: our module and the modules of transformers, against a loop over experts."""

import copy
import pickle

import pytest
import torch
import transformers
from cases import QUANTIZED, each_recipe, normal, with_gradients
from mixtures import FAMILIES, experts_of, model_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import tritonfp8
from tritonfp8 import Float8Experts, functional, recipes
from tritonfp8.layers.moe import experts as moe_experts
from tritonfp8.layers.moe.activation import swiglu
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr

pytestmark = pytest.mark.one_in(3)

each_family = pytest.mark.parametrize("family", FAMILIES)


def weights_of(experts):
    """The weight ``[N, K]`` and the bias of both layers of each expert."""
    layers = []
    for name in ("gate_up_proj", "down_proj"):
        weight, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
        weight = weight.transpose(1, 2) if getattr(experts, "is_transposed", False) else weight
        layers.append([(w, None if bias is None else bias[i]) for i, w in enumerate(weight)])
    return list(zip(*layers, strict=True))


def loop(experts, recipe, activation=None):
    """What experts compute, written as a loop over them."""
    activation = activation or experts._apply_gate

    def forward(hidden, top_k_index, top_k_weights):
        tokens, top_k = top_k_index.shape
        rows = hidden[:, None].expand(-1, top_k, -1).reshape(tokens * top_k, -1)
        out = torch.zeros_like(rows)
        for i, ((up, up_bias), (down, down_bias)) in enumerate(weights_of(experts)):
            mine = (top_k_index.flatten() == i).nonzero().flatten()
            if len(mine):
                inside = activation(functional.linear(rows[mine], up, up_bias, recipe))
                out = out.index_copy(0, mine, functional.linear(inside, down, down_bias, recipe))
        out = out * top_k_weights.reshape(-1, 1)
        return out.view(tokens, top_k, -1).sum(1).to(hidden.dtype)

    return forward


def losses_of(model, steps=10):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    found = []
    for _ in range(steps):
        ids = torch.randint(0, 96, (2, 12))
        loss = model(ids, labels=ids).loss
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


class TestTransformers:
    @each_family
    @each_recipe
    def test_ten_steps_are_those_of_a_loop_over_experts(self, family, recipe):
        """Bitwise: the GEMMs are the same, and so is the order in which the experts of a token are added."""
        model = model_of(family, torch.bfloat16)
        other = copy.deepcopy(model)
        report = tritonfp8.convert(model, recipe)
        assert [name for name in report.converted if "experts" in name.split(".")] == list(experts_of(model))
        tritonfp8.convert(other, recipe)
        for experts in experts_of(other).values():
            experts.forward = loop(experts, recipe)
        before = [p.detach().clone() for p in model.parameters()]
        losses = losses_of(model)
        assert losses == losses_of(other)
        assert_bitwise_equal(list(model.parameters()), list(other.parameters()))
        for (name, p), old in zip(model.named_parameters(), before, strict=True):
            assert not torch.equal(p, old), f"{name} did not train"

    @each_family
    def test_convert_swap_verify_revert(self, family):
        model = model_of(family)
        ids = torch.randint(0, 96, (2, 12))
        kinds, plain = {name: type(each) for name, each in experts_of(model).items()}, model(ids).logits
        state = {key: id(value) for key, value in model.named_parameters()}
        report = tritonfp8.convert(model, {"*.experts": "mxfp8", "*": "rowwise"})
        count = FAMILIES[family].get("num_local_experts", 8)
        for name, experts in experts_of(model).items():
            assert report.converted[name].name == "mxfp8"
            assert report.experts[name] == count
            assert f"mxfp8, {count} experts" in str(report)
            assert isinstance(experts, kinds[name])
            assert repr(experts).startswith("Float8")
            assert "recipe='mxfp8'" in repr(experts)
        assert {key: id(value) for key, value in model.named_parameters()} == state
        assert report.fp8_share > 0.75
        assert not any("experts.gate_up_proj" in name or "down_proj" in name for name in report.high_precision)
        checked = tritonfp8.verify(model, ids)
        for name in kinds:
            row = checked.layers[name]
            assert row.calls == 1
            assert {gemm: (each.op, each.kind, each.calls) for gemm, each in row.gemms.items()} == dict.fromkeys(
                ("output", "grad_input", "grad_weight"), ("tritonfp8.scaled_grouped_matmul", "reference", 2)
            )
        again = tritonfp8.convert(model, "rowwise")
        assert set(kinds) <= set(again.already)
        assert not torch.equal(model(ids).logits, plain)
        tritonfp8.swap_recipe(model, "bf16")
        # Sums are added in another order than in transformers.
        torch.testing.assert_close(model(ids).logits, plain, rtol=1e-4, atol=1e-5)
        assert set(kinds) <= set(tritonfp8.revert(model))
        assert {name: type(each) for name, each in experts_of(model).items()} == kinds
        assert_bitwise_equal(model(ids).logits, plain)
        assert all("recipe" not in each.__dict__ for each in experts_of(model).values())

    def test_copies_checkpoints_and_pickles(self, tmp_path):
        model = model_of("gpt_oss")
        tritonfp8.convert(model, "rowwise")
        ids = torch.randint(0, 96, (2, 12))
        expected = model(ids).logits
        model.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        tritonfp8.convert(loaded, "rowwise")
        pickled = pickle.loads(pickle.dumps(experts_of(model)["model.layers.0.mlp.experts"]))
        copied = copy.deepcopy(model)
        copied.model.layers[0].mlp.experts = pickled
        for other in (loaded, copied):
            assert_bitwise_equal(other(ids).logits, expected)
        assert type(pickled) is type(copied.model.layers[1].mlp.experts)

    def test_linear_layers_keep_their_bits_beside_experts(self):
        """Forward and backward of each linear layer, in a model with and without converted experts, of one input."""
        model = model_of("mixtral", torch.bfloat16)
        dense = copy.deepcopy(model)
        tritonfp8.convert(model, "rowwise")
        assert not set(experts_of(dense)) & set(tritonfp8.convert(dense, "rowwise", ["*_proj"]).converted)
        for name, layer in model.named_modules():
            if isinstance(layer, tritonfp8.Float8Linear):
                other, x = dense.get_submodule(name), torch.randn(12, 64, dtype=torch.bfloat16)
                assert layer.recipe == other.recipe
                outs = [each(x) for each in (layer, other)]
                grads = [torch.autograd.grad(y.sum(), m.weight)[0] for y, m in zip(outs, (layer, other), strict=True)]
                assert_bitwise_equal(outs[0], outs[1])
                assert_bitwise_equal(grads[0], grads[1])

    @pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
    def test_gradient_checkpointing_and_compile(self, compiled):
        model = model_of("qwen3_moe")
        tritonfp8.convert(model, "rowwise")
        expected = losses_of(copy.deepcopy(model), 2)
        if compiled:
            for each in experts_of(model).values():
                each.compile(fullgraph=True)
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        assert losses_of(model, 2) == expected

    def test_sensitivity_gives_experts_their_recipe_back(self):
        model, ids = model_of("mixtral"), torch.randint(0, 96, (2, 12))
        tritonfp8.convert(model, "rowwise")
        tritonfp8.sensitivity(model, {"input_ids": ids, "labels": ids}, ["rowwise"])
        assert all(each.recipe == recipes.get("rowwise") for each in experts_of(model).values())

    def test_filters_and_patterns(self):
        model = model_of("mixtral")
        first, second = experts_of(model)
        report = tritonfp8.convert(model, {"*.0.mlp.experts": "rowwise"})
        assert list(report.converted) == [first]
        assert report.skipped[second] == "no pattern matched"
        tritonfp8.revert(model)
        report = tritonfp8.convert(model, "rowwise", ["*.1.*"])
        assert second in report.converted
        assert report.skipped[first] == "no pattern of the filter matches it"
        tritonfp8.revert(model)
        report = tritonfp8.convert(model, "rowwise", lambda module, name: name == first)
        assert list(report.converted) == [first]

    def test_a_model_of_experts_alone(self):
        experts = next(iter(experts_of(model_of("qwen3_moe")).values()))
        report = tritonfp8.convert(nn.ModuleDict({"experts": experts}), "rowwise")
        assert list(report.converted) == ["experts"]
        assert report.fp8_share == 1


class TestFloat8Experts:
    def made(self, recipe="rowwise", bias=True):
        torch.manual_seed(0)
        return Float8Experts(5, 32, 48, recipe=recipe, bias=bias)

    def routed(self, tokens=20):
        """Tokens at the experts 0, 1, 3 and 4: expert 2 has none."""
        index = torch.stack([torch.arange(tokens) % 2, 3 + torch.arange(tokens) // 3 % 2], dim=1)
        return normal(tokens, 32), index, normal(tokens, 2, seed=1).softmax(1)

    @each_recipe
    @pytest.mark.parametrize("bias", [False, True])
    def test_is_a_loop_over_experts(self, recipe, bias):
        experts, (hidden, index, weights) = self.made(recipe, bias), self.routed()
        leaves = [hidden.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
        outs = (forward(hidden, index, weights) for forward in (experts, loop(experts, recipe, swiglu)))
        assert_bitwise_equal(*(with_gradients(out, leaves, normal(20, 32, seed=5)) for out in outs))

    def test_an_index_beyond_the_experts_is_no_expert(self):
        experts = self.made()
        hidden, index, weights = self.routed()
        found = experts(hidden, torch.where(index == 3, 5, index), weights)
        assert_bitwise_equal(found, experts(hidden, index, weights * (index != 3)))
        assert not torch.equal(found, experts(hidden, index, weights))

    @pytest.mark.parametrize("routed", [True, False])
    @each_recipe
    def test_a_batch_without_tokens(self, recipe, routed, monkeypatch):
        """Nothing comes out, and every gradient is there, so that no other rank waits for it."""
        monkeypatch.setattr(moe_experts, "can_route", lambda *args: routed)
        experts, (hidden, index, factors) = self.made(recipe), self.routed(0)
        leaves = [hidden.requires_grad_(), factors.requires_grad_(), *experts.parameters()]
        out = experts(hidden, index, factors)
        assert out.shape == (0, 32)
        out.sum().backward()
        assert [x.grad.shape for x in leaves] == [x.shape for x in leaves]
        assert not any(x.grad.any() for x in leaves)

    def test_revert_is_high_precision(self):
        model = nn.ModuleDict({"experts": self.made(), "head": nn.Linear(32, 32)})
        expected = loop(model["experts"], "bf16", swiglu)(*self.routed())
        assert tritonfp8.revert(model) == ["experts"]
        assert model["experts"].recipe == recipes.get("bf16")
        assert_bitwise_equal(model["experts"](*self.routed()), expected)

    def test_one_graph_whatever_the_routing(self):
        experts = self.made("blockwise", bias=False)
        compiled = torch.compile(experts, fullgraph=True)
        torch._dynamo.reset()
        stats = torch._dynamo.utils.counters["stats"]
        before = stats["unique_graphs"]
        hidden, index, weights = self.routed()
        for i in (index, index.flip(0), torch.zeros_like(index)):
            assert_bitwise_equal(compiled(hidden, i, weights), experts(hidden, i, weights))
        assert stats["unique_graphs"] == before + 1

    @pytest.mark.parametrize("recipe", ["bf16", "rowwise", "rowwise_hp_grad_weight"])
    def test_compiled_gradients(self, recipe):
        """Those of eager mode but for the rounding between the operations of SwiGLU."""
        experts = self.made(recipe)
        compiled = torch.compile(experts, fullgraph=True)

        def gradients(module):
            hidden, index, weights = self.routed()
            leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_(), *experts.parameters()]
            return with_gradients(module(leaves[0], index, leaves[1]), leaves)

        for found, expected in zip(gradients(compiled), gradients(experts), strict=True):
            assert sqnr(found, expected) > 30

    def backward_of(self, experts, hidden, index, weights):
        """The ops of a compiled backward, in their order, which decides its peak memory."""
        graphs = []

        def note(graph, inputs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=note, bw_compiler=note)
        compiled = torch.compile(experts, backend=backend, fullgraph=True, dynamic=False)
        compiled(hidden.requires_grad_(), index, weights.requires_grad_()).sum().backward()
        names = [str(node.target).removesuffix(".default") for node in graphs[1].graph.nodes]
        return [name.removeprefix("tritonfp8.") for name in names]

    @pytest.mark.parametrize(
        ("recipe", "gradient"), [("rowwise", "swiglu_backward_amax"), ("mxfp8", "swiglu_backward")]
    )
    def test_backward_lets_go_of_what_it_has_read_before_it_writes_more(self, recipe, gradient):
        names = self.backward_of(self.made(recipe, bias=False), *self.routed())
        # Only the gradient of the router's weights reads the rows of all experts.
        assert names.index("dots_of_rows") < names.index("quantize_groups_both")
        order = [name for name in names if hasattr(torch.ops.tritonfp8, name)]
        of_gradient = order.index(gradient)
        # Gradients of the rows, of SwiGLU and of the second layer's weight, and then the next casts.
        assert order[of_gradient - 1 : of_gradient + 3] == [
            "scaled_grouped_matmul", gradient, "scaled_grouped_matmul", "quantize_groups_both",
        ]  # fmt: skip

    def test_large_gradient_of_a_weight_is_made_after_the_casts(self):
        """The second layer's: the codes that it is made of take less memory."""
        experts = Float8Experts(2, 256, 256, recipe="rowwise")
        index, weights = torch.tensor([[0, 1]] * 8), torch.rand(8, 2)
        order = self.backward_of(experts, normal(8, 256), index, weights)
        of_gradient = order.index("swiglu_backward_amax")
        order = [name for name in order[of_gradient:] if hasattr(torch.ops.tritonfp8, name)]
        assert order[1:3] == ["quantize_groups_both", "scaled_grouped_matmul"]
        # So that GEMM was the second layer's: here the first one's begin.
        assert order[3] == "quantize_matrices"

    def test_export(self):
        """A program computes, for any number of tokens; it has no gradients, and says so."""
        experts, args = self.made("blockwise"), self.routed()
        tokens = torch.export.Dim("tokens", min=2, max=4096)
        program = torch.export.export(experts, args, dynamic_shapes=({0: tokens},) * 3).module()
        for batch in (args, self.routed(33)):
            assert_bitwise_equal(program(*batch), experts(*batch))
        with pytest.raises(RuntimeError, match="or experts"):
            program(*args).sum().backward()

    def test_errors(self):
        experts = self.made()
        hidden, index, weights = self.routed()
        for args in ((hidden[None], index, weights), (hidden, index[:-1], weights), (hidden, index, weights[:, :1])):
            with pytest.raises(ValueError, match=r"\[T, top_k\]"):
                experts(*args)
        for i, name in enumerate(("hidden states", "top_k_index", "top_k_weights")):
            with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor; got NoneType"):
                experts(*(None if i == j else x for j, x in enumerate((hidden, index, weights))))
        with pytest.raises(TypeError, match="top_k_index must be integers"):
            experts(hidden, index.float(), weights)
        for sizes in ((0, 32, 48), (5, 3.0, 48)):
            with pytest.raises(ValueError, match="must be a positive int"):
                Float8Experts(*sizes, recipe="rowwise")

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script")
    def test_script_is_an_error(self):
        with pytest.raises(TypeError, match=r"torch.jit.script needs layers of plain torch"):
            torch.jit.script(self.made())

    @pytest.mark.parametrize("recipe", QUANTIZED)
    def test_training_is_close_to_high_precision(self, recipe):
        """The experts learn another mixture: the loss falls as far as in high precision."""
        target = self.made("bf16")
        found = {}
        for name in (recipe, "bf16"):
            torch.manual_seed(1)
            experts = Float8Experts(5, 32, 48, recipe=name)
            optimizer = torch.optim.Adam(experts.parameters(), 3e-3)
            for i in range(60):
                _, index, weights = self.routed(64)
                hidden = normal(64, 32, seed=100 + i)
                loss = (experts(hidden, index, weights) - target(hidden, index, weights).detach()).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.setdefault(name, []).append(loss.item())
        assert found["bf16"][-1] < 0.5 * found["bf16"][0]
        assert found[recipe][-1] < 1.1 * found["bf16"][-1]
