"""A model that is partly converted, and a model that torchao converted."""

import pytest
import torch
from cases import llama, normal
from torch import nn
from torchao.float8 import convert_to_float8_training
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from tritonfp8 import Float8Linear, convert, recipes, revert
from tritonfp8.specs.testing import assert_bitwise_equal

ROWWISE, BLOCKWISE = recipes.get("rowwise"), recipes.get("blockwise")
# torchao warns about its own binaries, and about what it is made of.
pytestmark = pytest.mark.filterwarnings("ignore")


def model(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(count)])


class TestPartlyConverted:
    def test_the_rest_is_added_and_the_others_keep_their_recipe(self):
        found = model()
        convert(found, "rowwise", filter=["1"])
        first = found[1].recipe
        report = convert(found, "blockwise")
        assert report.converted == {"0": BLOCKWISE, "2": BLOCKWISE}
        assert report.already == {"1": ROWWISE}
        assert found[1].recipe is first
        assert str(report).splitlines()[:3] == [
            "2 converted, 0 skipped, 1 converted before; 100 % of the linear FLOPs run in FP8",
            "0,2 (2x)  blockwise",
            "1         rowwise, converted before",
        ]
        assert report.fp8_share == 1
        assert sorted(revert(found)) == ["0", "1", "2"]

    def test_layers_that_the_filter_excludes_stay_converted(self):
        found = model()
        convert(found, "rowwise", filter=["1"])
        report = convert(found, "blockwise", filter=lambda module, name: name == "0")
        assert list(report.converted) == ["0"]
        assert report.already == {"1": ROWWISE}
        assert report.skipped == {"2": "the filter returned False"}

    def test_the_filter_is_not_asked_about_converted_layers(self):
        found, asked = model(), []
        convert(found, "rowwise", filter=["1"])
        convert(found, "rowwise", filter=lambda module, name: asked.append(name) or True)
        assert asked == ["0", "2"]

    def test_nothing_new_is_no_error(self):
        found = model()
        convert(found, "rowwise")
        report = convert(found, {"1": "blockwise"}, filter=["1"])
        assert report.converted == {}
        assert len(report.already) == 3
        assert found[1].recipe is ROWWISE

    def test_a_pattern_that_matches_nothing_still_is(self):
        found = model()
        convert(found, "rowwise")
        with pytest.raises(ValueError, match="'9' decided the recipe of no layer"):
            convert(found, {"9": "blockwise"})
        with pytest.raises(ValueError, match="'9' of the filter match no linear layer"):
            convert(found, "blockwise", filter=["9"])

    def test_siblings_share_their_input_with_those_of_before(self):
        found, whole = llama(num_hidden_layers=1), llama(num_hidden_layers=1)
        convert(found, "rowwise", filter=["*q_proj"])
        attention = found.model.layers[0].self_attn
        assert attention.q_proj.shared_input is None
        convert(found, "rowwise")
        convert(whole, "rowwise")
        siblings = [getattr(attention, f"{name}_proj").shared_input._siblings for name in "qkv"]
        assert all(each is siblings[0] for each in siblings)
        shared = attention.q_proj.shared_input
        # Groups without a new layer stay, and compiled code that is guarded on them.
        convert(found, {"lm_head": "rowwise"})
        assert attention.q_proj.shared_input is shared
        x = normal(1, 5, 64)
        mlps = (each.model.layers[0].mlp for each in (found, whole))
        assert_bitwise_equal(*(mlp(x).detach() for mlp in mlps))


QUANTIZED = [Int8WeightOnlyConfig(), Float8WeightOnlyConfig()]


class TestTorchao:
    @pytest.mark.parametrize("config", QUANTIZED, ids=lambda config: type(config).__name__)
    def test_quantize_before(self, config):
        found = model()
        quantize_(found, config, filter_fn=lambda module, name: name == "1")
        before = [type(layer) for layer in found]
        with pytest.raises(TypeError, match=r"the weight of 1 must be a plain.*got \w+ of torchao.*filter"):
            convert(found, "rowwise")
        assert [type(layer) for layer in found] == before
        assert list(convert(found, "rowwise", filter=["0", "2"]).converted) == ["0", "2"]
        assert found(normal(2, 32)).shape == (2, 32)

    @pytest.mark.parametrize("config", QUANTIZED, ids=lambda config: type(config).__name__)
    def test_quantize_after(self, config):
        found = model()
        convert(found, "rowwise")
        with pytest.raises(TypeError, match=r"the weight of a converted layer must be a plain.*of torchao"):
            quantize_(found, config)
        assert isinstance(found[0], Float8Linear)
        assert found(normal(2, 32)).shape == (2, 32)

    def test_training_before(self):
        found = convert_to_float8_training(model(), module_filter_fn=lambda module, name: name == "1")
        with pytest.raises(TypeError, match=r"1 must be a plain nn\.Linear; got Float8Linear of torchao.*filter"):
            convert(found, "rowwise")
        report = convert(found, "rowwise", filter=lambda module, name: name != "1")
        assert list(report.converted) == ["0", "2"]
        assert list(report.high_precision) == ["1.weight"]
