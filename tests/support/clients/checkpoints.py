"""Small models, and the tensors of checkpoints computed without tritonfp8.export."""

import json
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import tritonfp8
from tritonfp8.specs.testing import assert_bitwise_equal

SIZES = {
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
# In multiples of 128, and not.
WHOLE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32}
RAGGED = {"hidden_size": 160, "intermediate_size": 200, "num_key_value_heads": 2, "head_dim": 40}
NAMES = {
    "llama": "Llama", "qwen3": "Qwen3", "moe": "Qwen3Moe", "mixtral": "Mixtral", "exaone": "ExaoneMoe",
    "granitemoe": "GraniteMoe", "gpt_neox": "GPTNeoX",
}  # fmt: skip
MODELS = {
    kind: (getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM"))
    for kind, name in NAMES.items()
}
EXPERTS = WHOLE | {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
# Experts have one block of 128x128 in EXPERTS, and several here.
MIXTRAL = WHOLE | {
    "hidden_size": 256, "num_hidden_layers": 2, "head_dim": 64, "intermediate_size": 128, "num_local_experts": 4,
}  # fmt: skip
FORMATS = ("fine_grained", "compressed_channel", "compressed_tensor", "compressed_block", "compressed_mxfp8")


def model_of(kind="llama", sizes=WHOLE, seed=0, dtype=torch.bfloat16, **options):
    """A transformers model with random weights; rows differ in size by many powers of two."""
    config, cls = MODELS[kind]
    torch.manual_seed(seed)
    model = cls(config(**SIZES | sizes | options)).to(dtype)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                rows = torch.randint(-9, 6, (module.out_features, 1))
                module.weight.copy_(torch.randn(module.weight.shape) * 2.0**rows)
    return model


def loaded(folder, kind="llama", sizes=WHOLE, **options):
    """A model of other weights that reads this checkpoint, and the report."""
    model = model_of(kind, sizes, seed=1, **options)
    return model, tritonfp8.export.load(model, folder)


def theirs_of(folder, format="fine_grained"):
    """The model that transformers reads, in high precision."""
    if format != "fine_grained":
        pytest.importorskip("compressed_tensors")
    config = transformers.FineGrainedFP8Config if format == "fine_grained" else transformers.CompressedTensorsConfig
    options = {"dtype": torch.bfloat16, "quantization_config": config(dequantize=True)}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def same(a, b):
    """Two sets of named tensors have the same names, dtypes and bits."""
    assert_bitwise_equal(dict(sorted(a.items())), dict(sorted(b.items())))


def files_of(folder):
    """Every tensor of a folder of safetensors files, by name."""
    found = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())["quantization_config"]


def blocks_of(format, shape):
    """The block of each format, by what the formats' own documents say."""
    n, k = shape
    return {
        "fine_grained": (128, 128),
        "compressed_channel": (1, k),
        "compressed_tensor": (n, k),
        "compressed_block": (128, 128),
        "compressed_mxfp8": (1, 32),
        "compressed_mxfp4": (1, 32),
    }[format]


def dequantized(codes, scale, block):
    """``codes * scale`` in float64, by a loop over blocks."""
    if scale.dtype == torch.uint8:
        scale = 2.0 ** (scale.double() - 127)
    rows, cols = block
    out = codes.double()
    grid = scale.double().reshape(-(-codes.shape[0] // rows), -(-codes.shape[1] // cols))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            out[i * rows : (i + 1) * rows, j * cols : (j + 1) * cols] *= grid[i, j]
    return out


def scale_name(format):
    return "weight_scale_inv" if format == "fine_grained" else "weight_scale"


def write(folder, tensors, config):
    """A checkpoint as another program writes it."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


FINE_GRAINED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["1"],
}


def compressed(strategy="channel"):
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["1"],
    }  # fmt: skip


def small(bias=False, **options):
    """The model of :func:`tensors`."""
    return nn.Sequential(nn.Linear(128, 256, bias=bias, **options), nn.Linear(256, 8, bias=False, **options))


def codes(*shape):
    return (torch.randn(shape) * 50).to(torch.float8_e4m3fn)


def tensors(**changes):
    """A checkpoint in FINE_GRAINED, with changes by name (``__`` for a dot); None takes a tensor out."""
    torch.manual_seed(0)
    found = {"0.weight": codes(256, 128), "0.weight_scale_inv": torch.rand(2, 1) + 0.5, "1.weight": torch.randn(8, 256)}
    found |= {name.replace("__", "."): x for name, x in changes.items()}
    return {name: x for name, x in found.items() if x is not None}


def check_error(folder, message, model=None, **options):
    """The load fails with this message, and the model is as before."""
    model = model or small()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        tritonfp8.export.load(model, folder, **options)
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name]), name


def are_equal(found, expected):
    """Whether two mappings have the same names, and equal tensors."""
    return found.keys() == expected.keys() and all(torch.equal(x, expected[name]) for name, x in found.items())


def adapter_losses(model, ids, steps, compiled=False):
    """Losses of LoRA on one batch, which fall; from the same first adapters for each model."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    run = torch.compile(adapted, backend="aot_eager") if compiled else adapted
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], 1e-2)
    return falling_losses(run, optimizer, ids, steps)


def falling_losses(run, optimizer, ids, steps):
    """Losses of a model on one batch, which fall."""
    losses = []
    for _ in range(steps):
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        run.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses
