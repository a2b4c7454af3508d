"""Programs that load checkpoints into models of ``quantized_init``: every parameter has the values of the checkpoint,
quantized, and is stored where ``convert`` would store it."""

import pickle

import accelerate
import diffusers
import loader_cases
import peft
import pytest
import safetensors.torch
import torch
import transformers
from accelerate.utils import load_checkpoint_in_model, set_module_tensor_to_device
from diffusion import flux
from loader_cases import SIZES, config_of, differing, plain, quantized, stored_after

import tritonfp8
from tritonfp8.layers.stored import stored_part

each_family = pytest.mark.parametrize("family", SIZES)


def check(found, family, expected=None):
    """The model has the values of the checkpoint, stored where ``convert`` stores them."""
    assert differing(found, stored_after(expected or plain(family), family)) == []


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A checkpoint of each family, as ``save_pretrained`` writes it, with parts of its own for experts."""
    found = {}
    for family in SIZES:
        found[family] = tmp_path_factory.mktemp(family)
        plain(family).save_pretrained(found[family])
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each family with the names and shapes of the model."""
    found = {family: tmp_path_factory.mktemp(family) / "model.safetensors" for family in SIZES}
    for family, file in found.items():
        state = {name: x.clone() for name, x in plain(family).state_dict().items()}
        safetensors.torch.save_file(state, file, metadata={"format": "pt"})
    return found


class TestTransformers:
    @each_family
    @pytest.mark.parametrize("options", [{}, {"device_map": {"": "cpu"}, "dtype": torch.bfloat16}], ids=["cpu", "map"])
    def test_from_pretrained(self, folders, family, options):
        with tritonfp8.quantized_init("rowwise"):
            found = transformers.AutoModelForCausalLM.from_pretrained(folders[family], **options)
        expected = transformers.AutoModelForCausalLM.from_pretrained(folders[family], **options)
        check(found, family, expected)
        ids = torch.arange(12)[None]
        assert torch.equal(found.eval()(ids).logits, expected.eval()(ids).logits)

    def test_initializes_what_a_checkpoint_lacks(self, tmp_path):
        """A weight without a mark is initialized, also after others were loaded."""
        model = plain("qwen3")
        name = "model.layers.1.mlp.up_proj.weight"
        others = {key: x for key, x in model.state_dict().items() if key != name}
        model.save_pretrained(tmp_path, state_dict=others)
        with tritonfp8.quantized_init("rowwise"):
            found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert differing(found, stored_after(model, "qwen3")) == [name]
        weight = found.get_parameter(name)
        assert stored_part(weight) is not None
        assert not weight.requires_grad
        assert weight.dequantize().std() == pytest.approx(model.config.initializer_range, rel=0.1)

    @each_family
    def test_init_weights_after_to_empty(self, family):
        found, expected = quantized(family, "meta"), plain(family, "meta")
        for model in (found, expected):
            model.to_empty(device="cpu")
            torch.manual_seed(1)
            model.init_weights()
        check(found, family, expected)


class TestAccelerate:
    @each_family
    def test_set_module_tensor_to_device(self, family):
        found = quantized(family, "meta")
        for name, x in plain(family).state_dict().items():
            set_module_tensor_to_device(found, name, "meta")
            set_module_tensor_to_device(found, name, "cpu", value=x)
        check(found, family)
        assert not any(p.requires_grad for p in found.parameters() if stored_part(p) is not None)

    @each_family
    def test_load_checkpoint_in_model(self, files, family):
        with accelerate.init_empty_weights():
            found = quantized(family, "cpu")
        load_checkpoint_in_model(found, files[family].parent, device_map={"": "cpu"})
        check(found, family)
        found = quantized(family, "cpu")
        load_checkpoint_in_model(found, files[family].parent)
        check(found, family)

    @each_family
    def test_load_checkpoint_and_dispatch(self, files, family):
        with tritonfp8.quantized_init("rowwise"), accelerate.init_empty_weights():
            found = transformers.AutoModelForCausalLM.from_config(config_of(family))
        found = accelerate.load_checkpoint_and_dispatch(found, files[family].parent, device_map="auto")
        check(found, family)


@each_family
@pytest.mark.parametrize("swap", [False, True])
def test_torch_load_state_dict(monkeypatch, family, swap):
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", swap)
    state, empty = plain(family).state_dict(), quantized(family, "meta").to_empty(device="cpu")
    for found, assign in (
        (quantized(family, "cpu"), False), (quantized(family, "cpu"), True), (quantized(family, "meta"), True),
        (empty, False),
    ):  # fmt: skip
        found.load_state_dict(state, assign=assign)
        check(found, family)


@each_family
def test_safetensors_load_model(files, family):
    found = quantized(family, "cpu")
    safetensors.torch.load_model(found, files[family])
    check(found, family)


@pytest.fixture(scope="module")
def adapters(folders, tmp_path_factory):
    """A folder with adapters of each family, which are not zero."""
    found = {}
    for family in SIZES:
        base = transformers.AutoModelForCausalLM.from_pretrained(folders[family])
        config = peft.LoraConfig(r=4, target_modules=["o_proj"], init_lora_weights=False)
        found[family] = tmp_path_factory.mktemp(f"{family}_adapters")
        peft.get_peft_model(base, config).save_pretrained(found[family])
    return found


@each_family
def test_adapters_of_a_model_that_is_stored(folders, adapters, family):
    saved = safetensors.torch.load_file(adapters[family] / "adapter_model.safetensors")
    expected = stored_after(plain(family), family)

    def base():
        return transformers.AutoModelForCausalLM.from_pretrained(folders[family])

    with tritonfp8.quantized_init("rowwise"):
        models = [
            peft.PeftModel.from_pretrained(base(), adapters[family]),
            peft.PeftModel.from_pretrained(base(), adapters[family], low_cpu_mem_usage=True),
            peft.AutoPeftModelForCausalLM.from_pretrained(adapters[family]),
        ]
    for model in models:
        found = {name: p for name, p in model.state_dict().items() if "lora" in name}
        assert len(found) == len(saved)
        for name, x in saved.items():
            assert torch.equal(found[f"{name.removesuffix('.weight')}.default.weight"], x), name
        assert differing(model.unload(), expected) == []


@pytest.mark.parametrize(
    "options",
    [{}, {"low_cpu_mem_usage": False}, {"device_map": "auto"}, {"torch_dtype": torch.bfloat16}],
    ids=["low", "not_low", "auto", "bfloat16"],
)
def test_diffusers_from_pretrained(tmp_path, options):
    flux()[0].save_pretrained(tmp_path)
    with tritonfp8.quantized_init("rowwise"):
        found = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, **options)
    expected = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path, **options)
    tritonfp8.convert(expected, "rowwise", mode="inference")
    assert differing(found, expected) == []


TEXT = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
# Layers that only the whole model shows to stay in high precision, or to be stored.
PLACES = {
    "BertForMaskedLM": (TEXT, ["cls.predictions.decoder"]),
    "RobertaForMaskedLM": ({**TEXT, "tie_word_embeddings": False}, ["lm_head.decoder"]),
    "RobertaForSequenceClassification": ({**TEXT, "num_labels": 40}, ["classifier.out_proj"]),
    "T5ForConditionalGeneration": (
        {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2,
         "tie_word_embeddings": False},
        ["encoder.block.0.layer.1.DenseReluDense.wo", "decoder.block.0.layer.2.DenseReluDense.wo", "lm_head"],
    ),
    "GPT2LMHeadModel": ({"vocab_size": 96, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 32}, ["lm_head"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("how", ["from_pretrained", "attributes", "load_state_dict", "to_empty"])
def test_what_the_whole_model_tells_counts_before_a_checkpoint_is_read(tmp_path, name, how):
    """Layers that stay in high precision have the values of the checkpoint, not rounded."""
    cls, (sizes, kept) = getattr(transformers, name), PLACES[name]
    source = cls(cls.config_class(**sizes))
    state = {key: x.clone() for key, x in source.state_dict().items()}
    source.save_pretrained(tmp_path)
    with tritonfp8.quantized_init("rowwise"):
        if how == "from_pretrained":
            found = cls.from_pretrained(tmp_path)
        else:
            with torch.device("cpu" if how == "load_state_dict" else "meta"):
                found = cls(cls.config_class(**sizes))
            if how == "to_empty":
                found.to_empty(device="cpu")
            if how == "attributes":
                # The head first: nothing was asked of the model before.
                for key in sorted(state, key=lambda key: not key.startswith(kept[0])):
                    parent, _, last = key.rpartition(".")
                    if last in found.get_submodule(parent)._parameters:
                        setattr(found.get_submodule(parent), last, torch.nn.Parameter(state[key]))
            else:
                found.load_state_dict(state)
    tritonfp8.convert(source, "rowwise", mode="inference")
    assert differing(found, source) == []
    for layer in kept:
        assert torch.equal(found.get_submodule(layer).weight, state[f"{layer}.weight"])
    assert not found._state_dict_pre_hooks
    pickle.loads(pickle.dumps(found))


def test_diffusers_tells_layers_of_one_name_apart(tmp_path):
    source, _ = flux()
    source.save_pretrained(tmp_path)
    with tritonfp8.quantized_init("rowwise"):
        found = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path)
    assert torch.equal(found.proj_out.weight, source.proj_out.weight)
    assert stored_part(found.single_transformer_blocks[0].proj_out.weight) is not None


def test_a_head_that_was_loaded_too_early_warns():
    """accelerate looks at the parameter before the model is asked for its state."""
    cls, (sizes, kept) = transformers.RobertaForSequenceClassification, PLACES["RobertaForSequenceClassification"]

    def load():
        with tritonfp8.quantized_init("rowwise"):
            with torch.device("meta"):
                found = cls(cls.config_class(**sizes))
            set_module_tensor_to_device(found, f"{kept[0]}.weight", "cpu", value=torch.ones(40, 32))

    with pytest.warns(UserWarning, match=f"{kept[0]} stays in high precision, and its weight was loaded"):
        load()


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("family", "recipe"),
    [("qwen3", "rowwise"), ("llama", "blockwise"), ("qwen3_moe", "mxfp8"), ("deepseek_v3", "rowwise")],
)
def test_fsdp2_on_the_meta_device(ranks, family, recipe):
    for wrong in ranks.run(2, loader_cases.materialised, family=family, recipe=recipe):
        assert wrong == {"whole": [], "copied": [], "assigned": []}
