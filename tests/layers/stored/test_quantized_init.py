"""Layers whose weights are stored in 8 bits as they are made."""

import copy
import pickle

import pytest
import torch
import transformers
from cast_counts import HighPrecisionMemory
from mixtures import COMMON, FAMILIES, experts_of
from torch import nn

import tritonfp8
from tritonfp8 import Float8Linear
from tritonfp8.layers.stored import StoredMatrices, StoredWeight, is_stored
from tritonfp8.specs.testing import assert_bitwise_equal

SIZE, LAYERS = 128, 10


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + self.down(self.up(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.router, self.lm_head = nn.Linear(SIZE, 4), nn.Linear(SIZE, 64)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


def made(recipe="rowwise", device="cpu"):
    torch.manual_seed(0)
    with tritonfp8.quantized_init(recipe), torch.device(device):
        return Model()


def converted(recipe="rowwise"):
    torch.manual_seed(0)
    model = Model()
    tritonfp8.convert(model, recipe, mode="inference")
    return model


def data():
    return torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_is_the_model_that_convert_makes(recipe):
    model, expected = made(recipe), converted(recipe)
    assert [type(m) for m in model.modules()] == [type(m) for m in expected.modules()]
    assert type(model.lm_head) is type(model.router) is nn.Linear
    check_equal(model, expected)
    assert "e4m3 x e4m3" in str(tritonfp8.verify(model, data()))
    assert type(nn.Sequential(nn.Linear(SIZE, SIZE))[0]) is nn.Linear


def test_one_layer_at_a_time_is_in_high_precision():
    weight = 4 * SIZE * SIZE
    with HighPrecisionMemory() as memory:
        made()
    # A layer, its parent's siblings before they are children, and what the cast works on.
    assert memory.peak < 6 * weight
    # Converted afterwards all layers are there at once: the measure sees them.
    with HighPrecisionMemory() as memory:
        converted()
    assert memory.peak > 2 * LAYERS * weight


@pytest.mark.parametrize("assign", [False, True])
def test_on_the_meta_device_and_loaded(assign):
    model, expected = made(device="meta"), converted()
    assert all(p.is_meta for p in model.parameters())
    if not assign:
        model.to_empty(device="cpu")
        assert is_stored(model.blocks[0].up)
    model.load_state_dict(expected.state_dict(), assign=assign)
    check_equal(model, expected)


def check_equal(model, expected):
    weight = model.blocks[0].up.weight
    assert (type(weight), weight.requires_grad) == (StoredWeight, False)
    assert is_stored(model.blocks[9].down)
    assert_bitwise_equal([model(data()).detach()], [expected(data()).detach()])
    assert_bitwise_equal([model.state_dict()], [expected.state_dict()])


def marked(tensor):
    parameter = nn.Parameter(tensor)
    parameter.loaded_by = "a loader"
    return parameter


def in_8_bits(model, folder):
    for parameter in model.parameters():
        parameter.loaded_by = "a loader"
    tritonfp8.export.save(converted("blockwise"), folder, "fine_grained")
    tritonfp8.export.load(model, folder)


LOADERS = {
    "attribute": lambda model, state, folder: [
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], marked(x))
        for name, x in state.items()
    ],
    "assign": lambda model, state, folder: model.load_state_dict(
        {name: marked(x) for name, x in state.items()}, assign=True
    ),
    "export.load": lambda model, state, folder: in_8_bits(model, folder),
}


@pytest.mark.parametrize("how", LOADERS)
def test_marks_of_parameters_are_carried(tmp_path, how):
    """By attributes of a Parameter programs know what they have loaded, or how they step it."""
    model, expected = made("blockwise", "meta"), converted("blockwise")
    LOADERS[how](model, expected.state_dict(), tmp_path)
    layer = model.blocks[0].up
    check_equal(model, expected)
    assert {getattr(p, "loaded_by", None) for p in model.parameters()} == {"a loader"}
    layer.reset_parameters()
    assert layer.weight.loaded_by == "a loader"
    assert copy.deepcopy(layer).weight.loaded_by == "a loader"
    tritonfp8.revert(model)
    assert type(layer.weight) is nn.Parameter
    # What belongs to the memory of a stored weight stays behind.
    assert layer.weight.__dict__ == {"loaded_by": "a loader"}
    assert {p.loaded_by for p in model.parameters()} == {"a loader"}
    tritonfp8.convert(model, "rowwise", mode="inference")
    assert is_stored(layer)
    assert {p.loaded_by for p in model.parameters()} == {"a loader"}


def test_a_mark_that_an_initialization_sets_is_kept():
    layer = made().blocks[0].up
    with layer.on_reset(layer):
        layer.weight.initialized = True
    assert is_stored(layer)
    assert layer.weight.initialized


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_values_by_the_constructor_of_a_weight_on_meta(recipe):
    """As accelerate and diffusers put tensors in the place of parameters."""
    model, expected = made(recipe, "meta"), converted(recipe)
    for name, values in expected.state_dict().items():
        parent, _, key = name.rpartition(".")
        module = model.get_submodule(parent)
        before = module._parameters[key]
        module._parameters[key] = type(before)(type(before)(before.to("meta")), requires_grad=False)
        module._parameters[key] = type(before)(values, before.requires_grad)
    check_equal(model, expected)


def test_a_model_on_meta_is_copied_moved_and_pickled():
    layer = made(device="meta").blocks[0].up
    again = pickle.loads(pickle.dumps(layer))
    for each in (again, copy.deepcopy(layer), layer):
        assert isinstance(each.weight, StoredWeight)
        assert each.weight.is_meta
        assert each(torch.empty(3, SIZE, device="meta")).shape == (3, SIZE)
    assert type(layer.to_empty(device="cpu").weight) is StoredWeight
    assert layer.to("meta").weight.is_meta


@pytest.mark.parametrize(
    "initialize",
    [
        lambda layer: layer.reset_parameters(),
        lambda layer: nn.init.normal_(layer.weight, std=0.05),
        lambda layer: nn.init.xavier_uniform_(layer.weight),
    ],
)
def test_initializations_are_those_of_a_plain_layer(initialize):
    model, plain = made(), nn.Linear(SIZE, SIZE)
    layer = model.blocks[0].up
    copied = copy.deepcopy(layer)
    torch.manual_seed(3)
    initialize(layer)
    torch.manual_seed(3)
    initialize(plain)
    holder = nn.Sequential(plain)
    tritonfp8.convert(holder, "rowwise", mode="inference")
    assert_bitwise_equal([layer.weight.dequantize()], [holder[0].weight.dequantize()])
    # The copy has hooks of its own.
    initialize(copied)
    assert not torch.equal(copied.weight.dequantize(), layer.weight.dequantize())


def test_a_filter_decides_by_the_name_in_the_parent():
    with tritonfp8.quantized_init("rowwise", filter=lambda layer, name: name == "down"):
        block = Block()
    assert (type(block.up), type(block.down)) == (nn.Linear, Float8Linear)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_a_model_keeps_in_float32_is_not_stored(device):
    """The layers know their model only at the end of the block."""

    def model(device):
        sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
        with torch.device(device):
            config = transformers.T5Config(tie_word_embeddings=False, **sizes)
            return transformers.T5ForConditionalGeneration(config)

    with tritonfp8.quantized_init("rowwise"):
        found = model(device)
    expected = model("cpu")
    tritonfp8.convert(expected, "rowwise", mode="inference")
    layers = [{n: (type(m), m.weight.dtype) for n, m in each.named_modules() if "Linear" in type(m).__name__}
              for each in (found, expected)]  # fmt: skip
    assert layers[0] == layers[1]
    kept = [name for name, (cls, _) in layers[0].items() if cls is nn.Linear]
    assert [name.rpartition(".")[2] for name in kept] == ["wo", "wo", "lm_head"]
    assert all(found.get_submodule(name).weight.requires_grad for name in kept)
    with tritonfp8.quantized_init("rowwise", filter=lambda layer, name: True):
        assert type(model(device).encoder.block[0].layer[1].DenseReluDense.wo) is Float8Linear


def test_errors_name_what_is_wrong():
    for arguments, make, error, message in (
        (["rowwise"], lambda: nn.LayerNorm(3), ValueError, "no layer was made inside quantized_init"),
        (["rowwise"], lambda: setattr(nn.Module(), "up", nn.Linear(SIZE, SIZE, dtype=torch.float16)), ValueError,
         "up: its weight is torch.float16"),
        (["bf16"], Block, ValueError, "computes the output in high precision"),
        (["rowwise", ["*"]], Block, TypeError, "filter must be a function"),
    ):  # fmt: skip
        with pytest.raises(error, match=message), tritonfp8.quantized_init(*arguments):
            make()
        assert type(Block().up) is nn.Linear


class TestExperts:
    CONFIG = transformers.AutoConfig.for_model("qwen3_moe", **COMMON, **FAMILIES["qwen3_moe"])

    def model(self, device="cpu"):
        torch.manual_seed(0)
        with torch.device(device):
            return transformers.AutoModelForCausalLM.from_config(self.CONFIG, dtype=torch.bfloat16)

    def test_are_the_experts_that_convert_stores(self):
        with tritonfp8.quantized_init("rowwise"):
            model = self.model()
        expected = self.model()
        tritonfp8.convert(expected, "rowwise", mode="inference")
        assert [type(p) for p in model.parameters()] == [type(p) for p in expected.parameters()]
        found, wanted = (list(each.state_dict().values()) for each in (model, expected))
        assert_bitwise_equal(found, wanted)
        ids = torch.arange(12)[None]
        assert_bitwise_equal([model(ids).logits], [expected(ids).logits])

    def test_stay_in_high_precision_by_a_filter(self):
        with tritonfp8.quantized_init("rowwise", lambda layer, name: name.endswith("_proj")):
            model = self.model()
        assert {type(p) for experts in experts_of(model).values() for p in experts.parameters()} == {nn.Parameter}

    def test_that_were_on_meta_are_loaded(self, tmp_path):
        source = self.model()
        tritonfp8.convert(source, "rowwise", mode="inference")
        tritonfp8.export.save(source, tmp_path, "compressed_channel")
        with tritonfp8.quantized_init("rowwise"):
            model = self.model("meta")
        experts = next(iter(experts_of(model).values()))
        assert isinstance(experts.down_proj, StoredMatrices)
        assert experts.down_proj.is_meta
        with pytest.warns(UserWarning, match="buffers, which are on the meta device still"):
            report = tritonfp8.export.load(model, tmp_path)
        assert {layer.again for layer in report.layers.values()} == {"codes kept"}
        for name, parameter in source.named_parameters():
            found = model.get_parameter(name)
            assert type(found) is type(parameter)
            if type(found) in (StoredWeight, StoredMatrices):
                assert_bitwise_equal([found._qdata], [parameter._qdata])
