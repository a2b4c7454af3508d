"""Small mixtures of experts of transformers, one of each family."""

import torch
import transformers

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "num_experts_per_tok": 2,
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
FAMILIES = {
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4},
    "qwen3_moe": {"intermediate_size": 96, "moe_intermediate_size": 48, "num_experts": 8, "head_dim": 16},
    "deepseek_v3": {
        "intermediate_size": 96, "moe_intermediate_size": 48, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 1, **LATENT,
    },
    "gpt_oss": {
        "intermediate_size": 64, "num_local_experts": 4, "head_dim": 16, "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


def model_of(family, dtype=torch.float32, **sizes):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **FAMILIES[family], **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.02)
    return model


def experts_of(model):
    return {name: module for name, module in model.named_modules() if name.endswith("mlp.experts")}
