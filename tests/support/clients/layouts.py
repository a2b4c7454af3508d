"""Checkpoints as families are published in 8 bits: names, dtypes and scales of tensors, index and config; all tiny."""

import json
import re

import torch
import transformers
from checkpoints import compressed, dequantized, files_of
from safetensors.torch import save_file

BASE = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 64}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 128, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 64,
}  # fmt: skip
ROUTED = {
    "moe_intermediate_size": 128, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
POWERS = {"scale_fmt": "ue8m0"}
_LINEAR = re.compile(r"(proj|proj_with_mqa|w[kq]|wq_[ab]|wkv|wo_[ab]|w[123])\.weight$")
_HIGH = re.compile(r"weights_proj|eh_proj|lm_head|\.gate\.weight")

# By name: class in transformers, sizes, quantization config, dtype of scales, name of scales, layer of further tokens.
FAMILIES = {
    "DeepSeek-V3": ("DeepseekV3", BASE | LATENT | ROUTED, FP8, torch.float32, "weight_scale_inv", 61),
    "DeepSeek-V3.1": ("DeepseekV3", BASE | LATENT | ROUTED, FP8 | POWERS, torch.float32, "weight_scale_inv", 61),
    "DeepSeek-V3.2": (
        "DeepseekV32", BASE | LATENT | ROUTED | {"index_n_heads": 4, "index_head_dim": 64, "index_topk": 8},
        FP8 | POWERS, torch.float32, "weight_scale_inv", 61,
    ),
    "DeepSeek-V4": (
        "DeepseekV4", BASE | ROUTED | {
            "num_key_value_heads": 1, "head_dim": 128, "q_lora_rank": 128, "o_groups": 2, "o_lora_rank": 128,
            "index_n_heads": 4, "index_head_dim": 64, "index_topk": 8,
        },
        FP8 | POWERS, torch.float8_e8m0fnu, "scale", "mtp",
    ),
    "Kimi-K2": ("DeepseekV3", BASE | LATENT | ROUTED, FP8, torch.float32, "weight_scale_inv", None),
    "Qwen3-FP8": ("Qwen3", BASE | GROUPED, FP8, torch.bfloat16, "weight_scale_inv", None),
    "Qwen3-MoE-FP8": (
        "Qwen3Moe", BASE | GROUPED | {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2},
        FP8, torch.bfloat16, "weight_scale_inv", None,
    ),
    "GLM-4.5-FP8": ("Glm4Moe", BASE | GROUPED | ROUTED, None, torch.bfloat16, "weight_scale", 46),
}  # fmt: skip


def published(folder, family):
    """Write a checkpoint of a family into ``folder``. Returns the model of its values, which transformers read."""
    kind, sizes, config, scale_dtype, key, further = FAMILIES[family]
    torch.manual_seed(0)
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    plain = folder.with_name("plain")
    model_class(getattr(transformers, f"{kind}Config")(**sizes)).bfloat16().save_pretrained(plain)
    found = files_of(plain)
    written = found
    # Published in float32, and kept so.
    biases = {
        name: torch.randn(x.shape) for name, x in found.items() if "e_score" in name or name.endswith("gate.bias")
    }
    found |= biases
    if further == "mtp":
        # transformers renames published tensors, and saves them under other names.
        written = {_of_v4(name): x for name, x in found.items()}
        written["mtp.0.norm.weight"] = torch.ones(256)
    elif further is not None:
        written = found | _of_further_tokens(found, further)
    values, tensors = {}, {}
    for name, x in written.items():
        if not _LINEAR.search(name) or _HIGH.search(name):
            values[name] = tensors[name] = x
            continue
        block = (1, x.shape[1]) if config is None else (128, 128)
        codes, scale = _quantized(x.float(), block, scale_dtype, config is not None and "scale_fmt" in config)
        tensors |= {name: codes, name.removesuffix("weight") + key: scale}
        values[name] = dequantized(codes, scale.float(), block).bfloat16()
    _write(folder, tensors, json.loads((plain / "config.json").read_text()), config or _of_glm(values))
    values.pop("mtp.0.norm.weight", None)
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    return model_class.from_pretrained(plain, dtype=torch.bfloat16)


def _quantized(x, block, dtype, powers):
    """Codes and scales, by a loop over blocks."""
    rows, columns = (-(-size // by) for size, by in zip(x.shape, block, strict=True))
    scale = torch.empty(rows, columns)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            found = x[part].abs().max() / 448
            scale[i, j] = 2 ** found.log2().ceil() if powers else found.to(dtype).float()
            codes[part] = (x[part] / scale[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale.to(dtype)


def _of_v4(name):
    others = {"model.embed_tokens.weight": "embed.weight"}
    return others.get(name, re.sub(r"hc_head\.hc_(\w+)$", r"hc_head_\1", name.removeprefix("model.")))


def _of_further_tokens(found, layer):
    """The tensors of a layer that predicts further tokens, which the class in transformers does not have."""
    start = f"model.layers.{layer}."
    made = {start + name.removeprefix("model.layers.1."): x.clone() for name, x in found.items() if "layers.1." in name}
    made |= {start + f"{name}.weight": found["model.norm.weight"].clone() for name in ("enorm", "hnorm")}
    made[start + "eh_proj.weight"] = torch.randn(256, 512).bfloat16()
    made[start + "shared_head.head.weight"] = found["lm_head.weight"].clone()
    return made


def _of_glm(names):
    gates = sorted(name.removesuffix(".weight") for name in names if name.endswith(".gate.weight"))
    config = compressed("channel") | {"ignore": ["lm_head", *gates], "kv_cache_scheme": None}
    config["config_groups"]["group_0"]["input_activations"] = {
        "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True,
    }  # fmt: skip
    return config


def _write(folder, tensors, config, quantization_config):
    """Three shards, in which a scale may be in another one than its codes, and their index."""
    folder.mkdir()
    names, weight_map = sorted(tensors), {}
    for at in range(3):
        file = f"model-{at + 1:05}-of-000003.safetensors"
        part = names[at * len(names) // 3 : (at + 1) * len(names) // 3]
        save_file({name: tensors[name].contiguous() for name in part}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(x.nbytes for x in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization_config}, indent=2))
