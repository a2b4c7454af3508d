"""Heads, routers, adapters, conditioning layers and what a model keeps in float32 stay so until a pattern names them;
look-alikes do not.
"""

import copy

import peft
import pytest
import torch
import transformers
from cases import llama
from diffusion import BATCH, DIFFUSION
from torch import nn

from tritonfp8 import convert, recipes
from tritonfp8.conversion.selection import linears
from tritonfp8.conversion.selection.choice import names_part
from tritonfp8.specs.testing import sqnr


def modules(**layers):
    """A module of linear layers ``name=(in, out)`` and of other modules."""
    model = nn.Module()
    for name, layer in layers.items():
        model.add_module(name, nn.Linear(*layer) if isinstance(layer, tuple) else layer)
    return model


def roles(model, recipe="rowwise", **options):
    """The layers that stay in high precision for their role, with the first words of the reason."""
    skipped = convert(model, recipe, **options).skipped
    return {name: reason.split(",")[0].split(" (")[0] for name, reason in skipped.items()}


def t5():
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, tie_word_embeddings=False
    )
    return transformers.T5ForConditionalGeneration(config)


HEAD, ROUTER, ADAPTER = "an output head", "a router", "an adapter"


class LikeForCausalLM(nn.Module):
    def __init__(self, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


class TestHeads:
    @pytest.mark.parametrize("name", ["lm_head", "output", "embed_out", "score"])
    def test_at_the_top(self, name):
        assert roles(modules(layer=(32, 32), **{name: (32, 40)})) == {name: HEAD}

    @pytest.mark.parametrize("name", ["lm_head", "embed_out"])
    def test_inside(self, name):
        assert roles(modules(layer=(32, 32), inner=modules(**{name: (32, 40)}))) == {f"inner.{name}": HEAD}

    def test_names_of_ordinary_layers_inside(self):
        inner = modules(output=(32, 40), score=(32, 40), output_proj=(32, 32), head=(32, 40))
        assert roles(modules(attention=inner)) == {}

    def test_beside_an_embedding_of_as_many_rows(self):
        """As torchtitan's Llama in a wrapper."""
        inner = modules(tok_embeddings=nn.Embedding(40, 32), layer=(32, 32), output=(32, 40))
        assert roles(modules(stage=inner)) == {"stage.output": HEAD}
        inner = modules(positions=nn.Embedding(41, 32), layer=(32, 32), output=(32, 40))
        assert roles(modules(stage=inner)) == {}

    def test_of_a_class_with_a_head(self):
        inner = LikeForCausalLM(layer=nn.Linear(32, 32), score=nn.Linear(32, 40))
        assert roles(modules(wrapped=inner)) == {"wrapped.score": HEAD}

    def test_in_a_compiled_model_and_a_compiled_head(self):
        model = modules(layer=(32, 32), output=(32, 40))
        assert roles(torch.compile(model)) == {"_orig_mod.output": HEAD}
        model = modules(layer=(32, 32), output=torch.compile(nn.Linear(32, 40)))
        assert roles(model) == {"output._orig_mod": HEAD}

    def test_tied_to_an_embedding_by_any_name(self):
        inner = modules(tokens=nn.Embedding(40, 32), decoder=(32, 40), layer=(32, 40))
        inner.decoder.weight = inner.tokens.weight
        report = convert(modules(inner=inner), "rowwise")
        assert list(report.skipped) == ["inner.decoder"]
        assert "its weight is inner.tokens.weight" in report.skipped["inner.decoder"]

    def test_on_the_meta_device(self):
        with torch.device("meta"):
            assert roles(llama()) == {"lm_head": HEAD}

    def test_a_head_by_itself_is_the_model(self):
        assert list(convert(nn.Linear(32, 40), "rowwise").converted) == [""]

    def test_bert_has_layers_with_such_names(self):
        sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
        config = transformers.BertConfig(num_hidden_layers=1, max_position_embeddings=16, **sizes)
        report = convert(transformers.BertForMaskedLM(config), "rowwise")
        assert {"bert.encoder.layer.0.attention.output.dense", "bert.encoder.layer.0.output.dense"} <= set(
            report.converted
        )
        assert list(report.skipped) == ["cls.predictions.decoder"]


class TestRouters:
    @pytest.mark.parametrize("name", ["gate", "router"])
    def test_of_few_experts(self, name):
        assert roles(modules(up=(128, 256), **{name: (128, 32)})) == {name: ROUTER}
        assert roles(modules(experts=nn.ModuleList(), up=(64, 64), **{name: (64, 64)})) == {name: ROUTER}

    def test_a_layer_of_a_router(self):
        assert roles(modules(up=(128, 256), router=modules(layer=(128, 32)))) == {"router.layer": ROUTER}

    def test_the_gate_of_an_mlp(self):
        assert roles(modules(gate=(128, 256), up=(128, 256), down=(256, 128))) == {}
        assert roles(modules(gate_proj=(128, 32), up_proj=(128, 32), gated=(128, 32))) == {}
        # As wide as its sibling: however narrow both are.
        assert roles(modules(gate=(256, 32), up=(256, 32))) == {}

    def test_mixtral_of_linear_layers(self):
        expert = modules(w1=(64, 32), w2=(32, 64), w3=(64, 32))
        model = modules(block_sparse_moe=modules(gate=(64, 16), experts=nn.ModuleList([expert])))
        assert roles(model) == {"block_sparse_moe.gate": ROUTER}


class TestAdapters:
    def test_of_peft(self):
        config = peft.LoraConfig(r=16, target_modules=["q_proj", "lm_head"])
        model = peft.get_peft_model(llama(num_hidden_layers=1), config)
        report = convert(model, "rowwise")
        assert sum(name.endswith("q_proj.base_layer") for name in report.converted) == 1
        kept = {name.removeprefix("base_model.model."): reason for name, reason in report.skipped.items()}
        assert list(kept) == [
            "model.layers.0.self_attn.q_proj.lora_A.default", "model.layers.0.self_attn.q_proj.lora_B.default",
            "lm_head.base_layer", "lm_head.lora_A.default", "lm_head.lora_B.default",
        ]  # fmt: skip
        assert kept["lm_head.base_layer"].startswith(HEAD)
        assert kept["lm_head.lora_A.default"] == (
            "an adapter, in high precision unless a pattern names it, such as '*.lora_A.*'"
        )

    def test_a_pattern_of_their_name(self):
        config = peft.LoraConfig(r=16, target_modules=["q_proj"], modules_to_save=["lm_head"])
        model = peft.get_peft_model(llama(num_hidden_layers=1), config)
        report = convert(model, {"*.lora_A.*": "blockwise", "*": "rowwise"})
        assert [name for name, recipe in report.converted.items() if recipe.name == "blockwise"] == [
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default"
        ]
        assert "base_model.model.lm_head.modules_to_save.default" in report.skipped


class Keeps(nn.Module):
    """Lists what it keeps in float32, as models of transformers and diffusers do."""

    def __init__(self, **layers):
        super().__init__()
        self._keep_in_fp32_modules = ["wo", "indexer.weights_proj"]
        self._keep_in_fp32_modules_strict = {"classifier.weight", "former", "k_norm"}
        for name, layer in layers.items():
            self.add_module(name, layer)


KEPT = "a layer that its model lists in _keep_in_fp32_modules"


class TestKeptInFloat32:
    def test_of_transformers(self):
        model = t5()
        kept = [name for name, reason in roles(model).items() if reason == KEPT]
        assert kept == [name for name, _ in model.named_modules() if name.endswith(".wo")]
        assert len(kept) == 2

    def test_whole_parts_of_names(self):
        """``two`` and ``word`` have no part ``wo``, and ``weights_proj`` counts in its indexer alone."""
        model = Keeps(
            two=modules(word=(32, 32), weights_proj=(32, 32), classifiers=(32, 32)),
            indexer=modules(weights_proj=(32, 32), wq=(32, 32)),
            choice=modules(classifier=(32, 32)),
            former=modules(layer=(32, 32)),
        )
        strict = f"{KEPT}_strict"
        found = {"indexer.weights_proj": KEPT, "choice.classifier": strict, "former.layer": strict}
        assert roles(model) == found

    def test_inside_wrappers(self):
        inner = Keeps(wo=nn.Linear(32, 32), layer=nn.Linear(32, 32))
        model = modules(wo=(32, 32), student=torch.compile(inner))
        assert roles(model) == {"student._orig_mod.wo": KEPT}
        config = peft.LoraConfig(r=16, target_modules=["wo"])
        model = peft.get_peft_model(Keeps(wo=nn.Linear(32, 32), layer=nn.Linear(32, 32)), config)
        assert roles(model)["base_model.model.wo.base_layer"] == KEPT

    def test_a_pattern_that_names_the_entry(self):
        model = Keeps(wo=nn.Linear(32, 32), former=modules(layer=(32, 32)), layer=nn.Linear(32, 32))
        assert roles(model, {"*wo": "blockwise", "*": "rowwise"}) == {"former.layer": f"{KEPT}_strict"}
        assert roles(model, filter=["former.*"]).get("former.layer") is None


CONDITION = "a conditioning layer"


class TestConditioning:
    """Layers that read a row an image: a timestep, a label, a pooled text."""

    @pytest.mark.parametrize("name", DIFFUSION)
    def test_no_converted_layer_of_diffusers_reads_a_row_an_image(self, name):
        model, inputs = DIFFUSION[name]()
        rows, names = {}, {module: layer for layer, module in linears(model)}

        def counted(layer, args):
            rows[layer] = args[0][..., 0].numel()

        for module in names:
            module.register_forward_pre_hook(counted)
        with torch.no_grad():
            model(**inputs)
        report = convert(model, "rowwise")
        per_image = {names[layer] for layer, count in rows.items() if count == BATCH}
        of_condition = {layer for layer, reason in report.skipped.items() if reason.startswith(CONDITION)}
        assert rows.keys() == names.keys()
        assert per_image.isdisjoint(report.converted)
        assert of_condition <= per_image
        # proj_out_1 of DiT reads the condition, and has the name of an output head.
        assert per_image - of_condition == ({"proj_out_1"} if name == "dit" else set())

    def test_of_the_code_of_papers(self):
        block = modules(qkv=(32, 96), adaLN_modulation=nn.Sequential(nn.SiLU(), nn.Linear(32, 192)))
        final = modules(linear=(32, 16), adaLN_modulation=nn.Sequential(nn.SiLU(), nn.Linear(32, 64)))
        model = modules(
            t_embedder=modules(mlp=nn.Sequential(nn.Linear(64, 32))), blocks=nn.Sequential(block), final=final
        )
        names = ["t_embedder.mlp.0", "blocks.0.adaLN_modulation.1", "final.adaLN_modulation.1"]
        assert roles(model) == dict.fromkeys(names, CONDITION)

    def test_layers_of_tokens_with_similar_names(self):
        """FocalNet modulates tokens by tokens, DBRX has its attention beside norms, and an embedder may read words."""
        model = modules(
            modulation=modules(projection_in=(32, 32)), norm_attn_norm=modules(attn=modules(Wqkv=(32, 96))),
            roberta_prelayernorm=modules(pooler=modules(dense=(32, 32))), normal=modules(layer=(32, 32)),
            timesformer=modules(temporal_dense=(32, 32)), text_embedder=modules(linear_1=(32, 32)), time_mix=(32, 32),
        )  # fmt: skip
        assert roles(model) == {}

    def test_a_pattern_that_names_it(self):
        model = modules(norm1=modules(linear=(32, 192)), time_embed=(32, 32), layer=(32, 32))
        assert roles(model, {"*norm1.*": "rowwise", "*": "rowwise"}) == {"time_embed": CONDITION}
        model = modules(norm1=modules(linear=(32, 192)), time_embed=(32, 32), layer=(32, 32))
        assert roles(model, filter=["time_embed", "layer"]).get("time_embed") is None

    def test_its_share_of_the_flops_of_a_token_is_nothing(self):
        report = convert(modules(norm1=modules(linear=(32, 192)), layer=(32, 32)), "rowwise")
        assert report.fp8_share == 1
        assert report.high_precision["norm1.linear.weight"].flops == 0

    def test_the_output_is_closer_to_high_precision_than_with_all_layers_converted(self):
        """The error of a scale is the error of all tokens of an image."""
        model, inputs = DIFFUSION["sd3"]()
        everywhere = copy.deepcopy(model)
        with torch.no_grad():
            expected = model(**inputs).sample
            convert(model, "rowwise")
            convert(everywhere, "rowwise", filter=lambda layer, name: name != "proj_out")
            default, worse = (sqnr(each(**inputs).sample, expected) for each in (model, everywhere))
        assert default > worse


class TestNamed:
    @pytest.mark.parametrize("pattern", ["lm_head", "*lm_head", "*head", "lm_*"])
    def test_a_pattern_that_names_a_head(self, pattern):
        report = convert(llama(), {pattern: "blockwise", "*": "rowwise"})
        assert report.converted["lm_head"] is recipes.get("blockwise")
        assert roles(llama(), filter=[pattern, "*.mlp.*"]).get("lm_head") is None

    def test_a_pattern_that_matches_everything_is_of_use_and_names_nothing(self):
        assert roles(llama(), {"*.layers.*": "rowwise", "*": "blockwise"}) == {"lm_head": HEAD}

    def test_a_filter_that_is_a_function_decides(self):
        assert roles(llama(), filter=lambda module, name: True) == {}

    @pytest.mark.parametrize(
        ("pattern", "part", "named"),
        [
            ("*", "gate", False),
            ("*.mlp.*", "gate", False),
            ("*.gate", "gate", True),
            ("model.layers.0.mlp.gate", "gate", True),
            ("*gate*", "gate", True),
            ("**", "gate", False),
            ("*.[g]ate", "gate", True),
            ("*mlp*", "gate", False),
        ],
    )
    def test_which_patterns_name_a_part(self, pattern, part, named):
        assert names_part(pattern, part) == named
