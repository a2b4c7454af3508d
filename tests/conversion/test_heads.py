"""What a model tells of its heads counts before their names; models inside of others are asked, too."""

from typing import ClassVar

import peft
import pytest
import torch
import transformers
from diffusion import DIFFUSION
from torch import nn

from tritonfp8 import convert, revert

HEAD = "an output head"
SIZES = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}


def heads(model, recipe="rowwise", **options):
    skipped = convert(model, recipe, **options).skipped
    return {name: reason for name, reason in skipped.items() if reason.startswith(HEAD)}


class Asked(nn.Module):
    """A model with the words of a library for its head, which has a name of its own."""

    def __init__(self, method, head):
        super().__init__()
        self.layer, self.to_words = nn.Linear(32, 32), head
        self.told = method

    def get_output_embeddings(self):
        return self.to_words if self.told == "get_output_embeddings" else None


class Timm(nn.Module):
    """The protocol of timm, which is not a dependency."""

    def __init__(self, *heads):
        super().__init__()
        self.blocks, self.heads_of_distillation = nn.Linear(32, 32), nn.ModuleList(heads)

    def get_classifier(self):
        return tuple(self.heads_of_distillation)


class Raises(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(32, 32), nn.Linear(32, 40)

    def get_output_embeddings(self):
        raise NotImplementedError

    def get_classifier(self):
        return "no module"


class Holder(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


class TestAsked:
    def test_a_layer(self):
        model = Asked("get_output_embeddings", nn.Linear(32, 40))
        assert heads(model) == {
            "to_words": f"{HEAD} (by get_output_embeddings of Asked), "
            "in high precision unless a pattern names it, such as '*to_words'"
        }

    def test_the_last_layer_of_a_block(self):
        block = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 40))
        assert list(heads(Asked("get_output_embeddings", block))) == ["to_words.2"]

    def test_several_as_timm_has_them(self):
        model = Timm(nn.Linear(32, 40), nn.Linear(32, 40))
        found = heads(model)
        assert list(found) == ["heads_of_distillation.0", "heads_of_distillation.1"]
        assert "by get_classifier of Timm" in found["heads_of_distillation.0"]
        assert heads(Timm(nn.Identity())) == {}

    def test_a_model_that_has_none(self):
        assert heads(Raises()) == {}
        assert heads(Asked("nothing", nn.Linear(32, 40))) == {}

    def test_inside_of_other_models(self):
        inner = Asked("get_output_embeddings", nn.Linear(32, 40))
        assert list(heads(Holder(parts=nn.ModuleList([Holder(student=inner)])))) == ["parts.0.student.to_words"]
        assert list(heads(torch.compile(Asked("get_output_embeddings", nn.Linear(32, 40))))) == ["_orig_mod.to_words"]

    def test_inside_of_adapters(self):
        config = peft.LoraConfig(r=16, target_modules=["layer"])
        model = peft.get_peft_model(Asked("get_output_embeddings", nn.Linear(32, 40)), config)
        assert list(heads(model)) == ["base_model.model.to_words"]
        config = peft.LoraConfig(r=16, target_modules=["to_words"])
        model = peft.get_peft_model(Asked("get_output_embeddings", nn.Linear(32, 40)), config)
        assert list(heads(model)) == ["base_model.model.to_words.base_layer"]

    def test_a_pattern_that_names_it(self):
        model = Asked("get_output_embeddings", nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 40)))
        assert convert(model, {"*to_words.*": "blockwise", "*": "rowwise"}).converted["to_words.1"].name == "blockwise"


class TestTransformers:
    def test_untied_and_nested_names(self):
        layers = {"num_hidden_layers": 1, "max_position_embeddings": 16, "tie_word_embeddings": False}
        for name, head in (
            ("BertForMaskedLM", "cls.predictions.decoder"),
            ("RobertaForMaskedLM", "lm_head.decoder"),
            ("ElectraForMaskedLM", "generator_lm_head"),
            ("RemBertForMaskedLM", "cls.predictions.decoder"),
        ):
            cls = getattr(transformers, name)
            model = cls(cls.config_class(**SIZES, **layers))
            assert list(heads(Holder(model=model))) == [f"model.{head}"], name

    def test_labels_beside_the_base_model(self):
        config = transformers.RobertaConfig(**SIZES, num_hidden_layers=1, num_labels=40)
        model = transformers.RobertaForSequenceClassification(config)
        found = heads(model)
        assert list(found) == ["classifier.out_proj"]
        assert "its features are num_labels of the config" in found["classifier.out_proj"]

    def test_a_vision_language_model(self):
        text = {"model_type": "llama", "num_hidden_layers": 1, "num_key_value_heads": 2, **SIZES}
        vision = {
            "model_type": "clip_vision_model", "num_hidden_layers": 1, "image_size": 8, "patch_size": 4,
            "projection_dim": 32, **{key: size for key, size in SIZES.items() if key != "vocab_size"},
        }  # fmt: skip
        config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=95)
        found = heads(Holder(agent=transformers.LlavaForConditionalGeneration(config)))
        assert list(found) == ["agent.lm_head"]

    def test_tied_by_keys_before_the_weights_are(self):
        class Untied(Holder):
            _tied_weights_keys: ClassVar = {"to_words.weight": "tokens.weight", "second.weight": "layer.weight"}

        model = Untied(
            tokens=nn.Embedding(40, 32), layer=nn.Linear(32, 32), second=nn.Linear(32, 32), to_words=nn.Linear(32, 40)
        )
        found = heads(Holder(inner=model))
        assert list(found) == ["inner.to_words"]
        assert "by _tied_weights_keys of Untied" in found["inner.to_words"]
        Untied._tied_weights_keys = [r"^to_words\.weight"]
        assert list(heads(model, filter=["to_words", "layer"])) == []


class TestNames:
    @pytest.mark.parametrize("name", ["head", "classifier", "logits", "proj_out"])
    def test_at_the_top(self, name):
        assert list(heads(Holder(layer=nn.Linear(32, 32), **{name: nn.Linear(32, 40)}))) == [name]
        block = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 40))
        assert list(heads(Holder(layer=nn.Linear(32, 32), **{name: block}))) == [f"{name}.1"]

    @pytest.mark.parametrize("name", ["head", "classifier", "logits", "proj_out"])
    def test_of_ordinary_layers_inside(self, name):
        assert heads(Holder(block=Holder(layer=nn.Linear(32, 32), **{name: nn.Linear(32, 40)}))) == {}

    def test_of_diffusers(self):
        """The blocks of Flux have layers of the same name as its last one."""
        report = convert(Holder(pipe=DIFFUSION["flux"]()[0]), "rowwise")
        assert [name for name, reason in report.skipped.items() if reason.startswith(HEAD)] == ["pipe.proj_out"]
        assert "pipe.single_transformer_blocks.0.proj_out" in report.converted

    def test_of_transformers_inside_of_a_unet(self):
        """Each of them is a model of diffusers, too."""
        model, _ = DIFFUSION["unet"]()
        report = convert(model, "rowwise")
        names = [name for name, _ in model.named_modules() if name.endswith("proj_out")]
        assert len(names) == 4
        assert set(names) <= report.converted.keys()
        transformer = model.mid_block.attentions[0]
        revert(model)
        assert list(heads(transformer)) == ["proj_out"]
