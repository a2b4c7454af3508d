"""convert, swap_recipe and revert: what changes, what must not, and what is said about it."""

import copy
import itertools
import re

import pytest
import safetensors.torch
import torch
from cases import each_recipe, llama, normal, tokens, with_head
from torch import nn
from torch.nn.utils import parametrizations

import tritonfp8
from tritonfp8 import Float8Linear, convert, recipes, revert, swap_recipe
from tritonfp8.compat.counting import count_gemms
from tritonfp8.recipes import Gemm, Recipe
from tritonfp8.specs.testing import assert_bitwise_equal

ROWWISE, BLOCKWISE = recipes.get("rowwise"), recipes.get("blockwise")
LAYERS = [
    f"model.layers.{i}.{block}.{name}_proj"
    for i in range(2)
    for block, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
    for name in names
]


ALL = with_head("rowwise")


def mlp(*sizes, bias=True):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def types(model):
    return {name: type(module) for name, module in model.named_modules()}


def state(model):
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def loss_of(model):
    ids = tokens()
    return model(input_ids=ids, labels=ids).loss


class TestConvert:
    def test_every_linear_layer_of_a_llama(self):
        model = llama()
        report = convert(model, ALL)
        assert list(report.converted) == [*LAYERS, "lm_head"]
        assert set(report.converted.values()) == {ROWWISE}
        assert report.skipped == {}
        assert {name for name, t in types(model).items() if t is Float8Linear} == set(report.converted)
        with count_gemms() as counts:
            loss_of(model).backward()
        # The input of the first layers needs a gradient too: the embedding learns.
        assert counts.calls == {"reference": 3 * 15}
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    def test_modules_parameters_and_keys_stay(self):
        model = llama()
        modules, parameters, before = dict(model.named_modules()), dict(model.named_parameters()), state(model)
        convert(model, "blockwise")
        assert all(module is modules[name] for name, module in model.named_modules())
        assert all(p is parameters[name] for name, p in model.named_parameters())
        assert list(model.state_dict()) == list(before)
        assert_bitwise_equal(state(model), before)

    def test_layer_computes_by_its_recipe(self):
        layer = mlp(70, 20)
        x = normal(5, 70)
        plain = layer(x)
        convert(layer, "mxfp8")
        assert_bitwise_equal(layer(x), tritonfp8.functional.linear(x, layer[0].weight, layer[0].bias, "mxfp8"))
        assert not torch.equal(layer(x), plain)

    def test_bf16_recipe_is_the_plain_layer(self):
        model = llama().bfloat16()
        plain = model(tokens()).logits
        convert(model, "bf16")
        assert_bitwise_equal(model(tokens()).logits, plain)

    def test_model_that_is_a_linear_layer(self):
        layer = nn.Linear(32, 32)
        assert convert(layer, "rowwise").converted == {"": ROWWISE}
        assert type(layer) is Float8Linear
        assert revert(layer) == [""]
        assert type(layer) is nn.Linear

    def test_optimizer_made_before_updates_the_converted_model(self):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        convert(model, "rowwise")
        first = loss_of(model)
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
        assert loss_of(model) < first - 0.1

    def test_hooks_survive(self):
        model = mlp(32, 32)
        calls = []
        model[0].register_forward_pre_hook(lambda module, args: calls.append("pre"))
        model[0].register_forward_hook(lambda module, args, out: calls.append("forward"))
        model[0].register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("backward"))
        model[0].weight.register_hook(lambda grad: calls.append("weight"))
        convert(model, "rowwise")
        model(normal(4, 32).requires_grad_()).sum().backward()
        revert(model)
        model(normal(4, 32))
        assert sorted(calls[:4]) == ["backward", "forward", "pre", "weight"]
        assert calls[4:] == ["pre", "forward"]

    def test_tied_weights_stay_tied(self):
        model = llama(tie_word_embeddings=True)
        convert(model, ALL)
        assert type(model.lm_head) is Float8Linear
        assert model.lm_head.weight is model.model.embed_tokens.weight
        loss_of(model).backward()
        with torch.no_grad():
            # Tokens that no input holds get their gradient through the output layer.
            unseen = torch.ones(128, dtype=torch.bool)
            unseen[tokens()] = False
            assert model.model.embed_tokens.weight.grad[unseen].any()
        revert(model)
        assert model.lm_head.weight is model.model.embed_tokens.weight

    def test_module_under_two_names_is_one_layer(self):
        shared = nn.Linear(32, 32)
        model = nn.ModuleDict({"first": shared, "second": shared})
        assert list(convert(model, "rowwise").converted) == ["first"]
        assert model["second"] is shared
        assert type(shared) is Float8Linear
        assert list(swap_recipe(model, "blockwise").converted) == ["first"]
        assert revert(model) == ["first"]

    def test_deepcopy_of_a_converted_model(self):
        model = llama()
        convert(model, "rowwise")
        twin = copy.deepcopy(model)
        assert types(twin) == types(model)
        assert_bitwise_equal(twin(tokens()).logits, model(tokens()).logits)
        swap_recipe(twin, "blockwise")
        up = model.model.layers[0].mlp.up_proj
        assert up.recipe is ROWWISE
        with torch.no_grad():
            twin.model.layers[0].mlp.up_proj.weight.zero_()
        assert up.weight.any()

    def test_recipe_handed_in_is_kept_and_not_written_to(self):
        recipe = Recipe("mine", output=Gemm(*(BLOCKWISE.output.lhs,) * 2))
        text = recipe.to_json()
        model = llama()
        report = convert(model, recipe)
        loss_of(model).backward()
        assert report.converted[LAYERS[0]] is model.get_submodule(LAYERS[0]).recipe is recipe
        assert recipe.to_json() == text


class TestSelection:
    def test_small_layers_are_skipped_with_the_reason(self):
        model = mlp(8, 32, 32, 15, 4)
        report = convert(model, "rowwise")
        assert list(report.converted) == ["1"]
        assert report.skipped == {
            "0": "in_features=8 below 16",
            "2": "out_features=15 below 16",
            "3": "in_features=15 and out_features=4 below 16",
        }

    def test_filter_decides_in_place_of_the_default(self):
        model = mlp(8, 32, 32)
        seen = []

        def keep(module, name):
            seen.append((module, name))
            return name == "0"

        report = convert(model, "rowwise", filter=keep)
        assert seen == [(model[0], "0"), (model[1], "1")]
        assert list(report.converted) == ["0"]
        assert report.skipped == {"1": "the filter returned False"}
        assert types(model)["1"] is nn.Linear

    def test_filter_that_fails_changes_nothing(self):
        model = mlp(32, 32, 32)

        def broken(module, name):
            if name == "1":
                raise KeyError(name)
            return True

        with pytest.raises(KeyError):
            convert(model, "rowwise", filter=broken)
        assert set(types(model).values()) == {nn.Sequential, nn.Linear}

    def test_patterns_give_recipes_and_the_first_match_wins(self):
        model = llama()
        report = convert(model, {"*.layers.0.mlp.*": "bf16", "*.mlp.*": BLOCKWISE, "*self_attn.[qk]_proj": "rowwise"})
        assert {name: recipe.name for name, recipe in report.converted.items()} == {
            **{name: "bf16" for name in LAYERS if "layers.0.mlp" in name},
            **{name: "blockwise" for name in LAYERS if "layers.1.mlp" in name},
            **{name: "rowwise" for name in LAYERS if name.endswith(("q_proj", "k_proj"))},
        }
        assert {name for name, reason in report.skipped.items() if reason == "no pattern matched"} == {
            name for name in LAYERS if name.endswith(("v_proj", "o_proj"))
        }
        assert model.model.layers[1].mlp.up_proj.recipe is BLOCKWISE

    @pytest.mark.parametrize(
        ("patterns", "message"),
        [
            ({"*.mlp.*": "rowwise", "*.mpl.*": "bf16"}, r"'\*\.mpl\.\*' decided.*matches none.*model\.layers\.0"),
            ({"*": "rowwise", "lm_head": "bf16"}, "'lm_head' decided the recipe of no layer.*first match wins"),
            ({"*.mlp.*": "rowise"}, "did you mean 'rowwise'"),
            ({}, "empty"),
        ],
    )
    def test_pattern_of_no_use_is_an_error_and_changes_nothing(self, patterns, message):
        model = llama()
        before = types(model)
        with pytest.raises(ValueError, match=message):
            convert(model, patterns)
        assert types(model) == before
        convert(model, ALL)
        with pytest.raises(ValueError, match=message):
            swap_recipe(model, patterns)
        assert model.lm_head.recipe is ROWWISE

    @pytest.mark.parametrize(
        ("model", "message"),
        [
            (nn.Sequential(nn.ReLU()), "no nn.Linear"),
            (mlp(8, 8), "nothing was converted.*in_features=8 and out_features=8 below 16"),
        ],
    )
    def test_nothing_converted_is_an_error_that_says_why(self, model, message):
        with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
            convert(model, "rowwise")

    def test_what_is_no_module(self):
        with pytest.raises(TypeError, match="nn.Module; got dict"):
            convert({}, "rowwise")
        with pytest.raises(TypeError, match="a name or a tritonfp8.Recipe; got int"):
            convert(mlp(32, 32), 3)

    def test_attention_is_left_alone_and_works(self):
        """Its output layer is read past its forward."""
        torch.manual_seed(0)
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 2), "linear": nn.Linear(32, 32)})
        report = convert(model, "rowwise")
        assert list(report.converted) == ["linear"]
        assert "NonDynamicallyQuantizableLinear" in report.skipped["attention.out_proj"]
        x = normal(3, 2, 32)
        assert model["attention"](x, x, x)[0].shape == x.shape

    def test_subclass_may_compute_something_else(self):
        class Scaled(nn.Linear):
            def forward(self, input):
                return 2 * super().forward(input)

        model = nn.Sequential(Scaled(32, 32), nn.Linear(32, 32))
        report = convert(model, "rowwise", filter=lambda module, name: True)
        assert report.skipped == {"0": "a subclass of nn.Linear (Scaled), which may compute something else"}
        assert type(model[0]) is Scaled

    def test_parametrized_layer_is_skipped(self):
        model = mlp(32, 32, 32)
        parametrizations.weight_norm(model[0])
        report = convert(model, "rowwise")
        assert report.skipped == {"0": "parametrized: its weight is computed and not a parameter"}
        assert model(normal(3, 32)).shape == (3, 32)

    def test_report_is_a_table(self):
        report = convert(mlp(8, 32, 32), "rowwise")
        assert str(report) == (
            "1 converted, 1 skipped; 80 % of the linear FLOPs run in FP8\n"
            "1  rowwise\n0  skipped (20 % of the FLOPs): in_features=8 below 16\n"
            "tritonfp8.verify(model, batch) shows what runs"
        )


class TestSwap:
    def test_changes_the_recipe_and_nothing_else(self):
        model = llama()
        convert(model, {"*self_attn*": "rowwise", "*mlp*": "mxfp8"})
        before, parameters = state(model), dict(model.named_parameters())
        report = swap_recipe(model, {"*mlp*": "blockwise"})
        assert set(report.converted.values()) == {BLOCKWISE}
        assert set(report.skipped.values()) == {"no pattern matched"}
        assert model.model.layers[0].self_attn.q_proj.recipe is ROWWISE
        assert model.model.layers[0].mlp.up_proj.recipe is BLOCKWISE
        assert_bitwise_equal(state(model), before)
        assert all(p is parameters[name] for name, p in model.named_parameters())
        assert type(model.lm_head) is nn.Linear

    def test_equal_recipe_keeps_the_object(self):
        model = mlp(32, 32)
        convert(model, "rowwise")
        equal = Recipe.from_json(ROWWISE.to_json())
        assert equal is not ROWWISE
        swap_recipe(model, equal)
        assert model[0].recipe is ROWWISE

    def test_model_that_is_not_converted(self):
        with pytest.raises(ValueError, match="no converted layer: use tritonfp8.convert"):
            swap_recipe(llama(), "rowwise")

    def test_unknown_recipe_changes_nothing(self):
        model = mlp(32, 32)
        convert(model, "rowwise")
        with pytest.raises(ValueError, match="no recipe is named 'nope'"):
            swap_recipe(model, "nope")
        assert model[0].recipe is ROWWISE


class TestRevert:
    def test_gives_back_the_types_and_the_arithmetic(self):
        model = llama()
        before_types, before, plain = types(model), state(model), model(tokens()).logits
        report = convert(model, {"*mlp*": "rowwise", "lm_head": "mxfp8"})
        assert revert(model) == list(report.converted)
        assert types(model) == before_types
        assert_bitwise_equal(state(model), before)
        assert_bitwise_equal(model(tokens()).logits, plain)
        assert not hasattr(model.lm_head, "recipe")
        assert repr(model) == repr(llama())
        assert list(convert(model, ALL).converted) == [*LAYERS, "lm_head"]

    def test_nothing_to_revert(self):
        with pytest.raises(ValueError, match="nothing to revert"):
            revert(llama())


class TestCheckpoints:
    @pytest.mark.parametrize(("recipe", "other"), list(itertools.pairwise([*recipes.names(), "bf16"])))
    def test_safetensors_to_a_plain_model_and_back(self, tmp_path, recipe, other):
        model = llama().bfloat16()
        convert(model, with_head(recipe))
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        trained = state(model)
        safetensors.torch.save_file(model.state_dict(), tmp_path / "converted.safetensors")
        plain = llama(initializer_range=0.5).bfloat16()
        plain.load_state_dict(safetensors.torch.load_file(tmp_path / "converted.safetensors"), strict=True)
        assert_bitwise_equal(state(plain), trained)
        safetensors.torch.save_file(plain.state_dict(), tmp_path / "plain.safetensors")
        again = llama(initializer_range=0.5).bfloat16()
        convert(again, other)
        again.load_state_dict(safetensors.torch.load_file(tmp_path / "plain.safetensors"), strict=True)
        assert_bitwise_equal(state(again), trained)

    @each_recipe
    def test_transformers_save_and_load(self, tmp_path, recipe):
        import transformers

        model = llama()
        convert(model, recipe)
        model.save_pretrained(tmp_path)
        plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert types(plain) == types(llama())
        assert_bitwise_equal(state(plain), state(model))

    @each_recipe
    def test_torch_save_needs_no_pickled_code(self, tmp_path, recipe):
        model = llama()
        convert(model, recipe)
        optimizer = torch.optim.AdamW(model.parameters())
        loss_of(model).backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
        loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        plain = llama(initializer_range=0.5)
        plain.load_state_dict(loaded["model"], strict=True)
        assert_bitwise_equal(state(plain), state(model))
        torch.optim.AdamW(plain.parameters()).load_state_dict(loaded["optimizer"])

    def test_converted_on_meta_then_loaded(self):
        source = llama()
        expected = copy.deepcopy(source)
        convert(expected, "rowwise")
        with torch.device("meta"):
            model = llama()
        convert(model, "rowwise")
        assert all(p.is_meta for p in model.parameters())
        model.load_state_dict(source.state_dict(), strict=True, assign=True)
        # Not in the state_dict: what a model computes from its config.
        for name, buffer in source.named_buffers():
            model.get_submodule(name.rpartition(".")[0]).register_buffer(
                name.rpartition(".")[2], buffer, persistent=False
            )
        assert_bitwise_equal(model(tokens()).logits, expected(tokens()).logits)
