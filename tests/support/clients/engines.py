"""Tensors of inference engines with the names and shapes of vLLM, made from configs, and taken apart again."""

import functools
from typing import NamedTuple

import torch
import transformers
from checkpoints import blocks_of, scale_name

import tritonfp8

VOCABULARY = 90
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "num_hidden_layers": 1, "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
MOE = {"moe_intermediate_size": 512, "num_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK = {
    "num_key_value_heads": 4, "num_hidden_layers": 2, "n_shared_experts": 1, "n_routed_experts": 4, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 96, "q_lora_rank": 128,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 64, "hidden_size": 256, "moe_intermediate_size": 256,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", COMMON | {"attention_bias": True}),
    "qwen3": ("Qwen3", COMMON),
    "moe": ("Qwen3Moe", COMMON | MOE),
    "deepseek": ("DeepseekV3", COMMON | DEEPSEEK),
}
FORMATS = ("fine_grained", "compressed_channel", "compressed_mxfp8", "compressed_mxfp4")
RECIPES = dict(zip(FORMATS, ("blockwise", "rowwise", "mxfp8", "mxfp4_weights"), strict=True))


class Joined(NamedTuple):
    """A linear layer of the engine: its parts with rows, K, the dim that ranks share, and heads of later parts."""

    name: str
    parts: tuple[tuple[str, int], ...]
    k: int
    dim: int | None = 0
    heads: int | None = None
    experts: int = 0
    bias: bool = False

    def copies(self, part, ranks):
        return max(1, ranks // self.heads) if self.heads and part else 1


@functools.cache
def trainer_of(kind, format, seed=0, dtype=torch.bfloat16):
    name, sizes = FAMILIES[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for x in model.parameters():
            # Equal rows, and norms of ones, would hide that some were swapped.
            x.copy_(torch.randn(x.shape) * 2.0 ** torch.randint(-9, 6, (*x.shape[:-1], 1)))
    tritonfp8.convert(model, RECIPES[format])
    return model


def layers_of(kind):
    sizes = FAMILIES[kind][1]
    hidden, inter, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]

    def mlp(name, n, experts=0):
        if experts:
            yield Joined(
                f"{name}.w13_", ((f"{name}.*.gate_proj.", n), (f"{name}.*.up_proj.", n)), hidden, 0, None, experts
            )
            yield Joined(f"{name}.w2_", ((f"{name}.*.down_proj.", hidden),), n, 1, None, experts)
            return
        yield Joined(f"{name}.gate_up_proj.", ((f"{name}.gate_proj.", n), (f"{name}.up_proj.", n)), hidden)
        yield Joined(f"{name}.down_proj.", ((f"{name}.down_proj.", hidden),), n, 1)

    for at in range(sizes["num_hidden_layers"]):
        attention, block = f"model.layers.{at}.self_attn", f"model.layers.{at}.mlp"
        if kind == "deepseek":
            lora, kv = sizes["q_lora_rank"], sizes["kv_lora_rank"]
            rows = (f"{attention}.q_a_proj.", lora), (f"{attention}.kv_a_proj_with_mqa.", kv + 32)
            yield Joined(f"{attention}.fused_qkv_a_proj.", rows, hidden, None)
            yield Joined(f"{attention}.q_b_proj.", ((f"{attention}.q_b_proj.", heads * 64),), lora)
            yield Joined(f"{attention}.kv_b_proj.", ((f"{attention}.kv_b_proj.", heads * 96),), kv)
            yield Joined(f"{attention}.o_proj.", ((f"{attention}.o_proj.", hidden),), heads * 64, 1)
        else:
            kv, bias = sizes["num_key_value_heads"], sizes.get("attention_bias", False)
            rows = tuple((f"{attention}.{x}_proj.", n * 128) for x, n in (("q", heads), ("k", kv), ("v", kv)))
            yield Joined(f"{attention}.qkv_proj.", rows, hidden, 0, kv, bias=bias)
            yield Joined(f"{attention}.o_proj.", ((f"{attention}.o_proj.", hidden),), heads * 128, 1, bias=bias)
        if kind == "moe" or (kind == "deepseek" and at == 1):
            yield from mlp(f"{block}.experts", sizes["moe_intermediate_size"], 4)
        else:
            yield from mlp(block, inter)
        if kind == "deepseek" and at == 1:
            yield from mlp(f"{block}.shared_experts", sizes["moe_intermediate_size"])


def _grid(format, n, k, whole):
    rows, cols = blocks_of(format, (n, k))
    return -(-n // rows), 1 if cols == whole else -(-k // cols)


def engine_of(kind, format, ranks=1, rank=0, expert_ranks=1, dtype=torch.bfloat16):
    """The tensors of one rank, which have other weights; rows that pad the vocabulary are zero.

    Args:
        kind: of FAMILIES.
        format: of its codes.
        ranks, rank: of tensor parallelism, or of expert parallelism for experts if ``expert_ranks`` is not 1.
        expert_ranks: ranks that share the experts, which are whole then.
        dtype: of the other tensors.
    """
    found = {}
    for layer in layers_of(kind):
        lead = (layer.experts // expert_ranks,) if layer.experts else ()
        split = 1 if layer.experts and expert_ranks > 1 else ranks
        n = sum(
            rows * layer.copies(part, split) // (split if layer.dim == 0 else 1)
            for part, (_, rows) in enumerate(layer.parts)
        )
        k = layer.k // split if layer.dim == 1 else layer.k
        scale = torch.uint8 if "mxfp" in format else torch.float32
        if codes_name(format) == "weight_packed":
            found[f"{layer.name}weight_packed"] = torch.ones(*lead, n, k // 2, dtype=torch.uint8)
        else:
            found[f"{layer.name}weight"] = torch.ones(*lead, n, k).to(torch.float8_e4m3fn)
        found[layer.name + scale_name(format)] = torch.ones(
            *lead, *_grid(format, n, k, layer.k // (split if layer.dim == 1 else 1)), dtype=scale
        )
        if layer.bias:
            found[f"{layer.name}bias"] = torch.ones(n, dtype=dtype)
    hidden = FAMILIES[kind][1]["hidden_size"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        # 64 are the rows that vLLM pads to.
        found[name] = torch.ones(128 // ranks, hidden, dtype=dtype)
        found[name][max(0, VOCABULARY - rank * 128 // ranks) :] = 0
    return found | {name: torch.ones(shape, dtype=kept or dtype) for name, (shape, kept) in _others(kind).items()}


def _others(kind):
    """Shapes of the tensors that every rank has, and the dtypes of tensors that keep theirs."""
    sizes, found = FAMILIES[kind][1], {"model.norm.weight": ((FAMILIES[kind][1]["hidden_size"],), None)}
    for at in range(sizes["num_hidden_layers"]):
        layer, hidden = f"model.layers.{at}", (sizes["hidden_size"],)
        found |= {f"{layer}.{x}_layernorm.weight": (hidden, None) for x in ("input", "post_attention")}
        if kind in ("qwen3", "moe"):
            found |= {f"{layer}.self_attn.{x}_norm.weight": ((128,), None) for x in ("q", "k")}
        if kind == "deepseek":
            found[f"{layer}.self_attn.q_a_layernorm.weight"] = (sizes["q_lora_rank"],), None
            found[f"{layer}.self_attn.kv_a_layernorm.weight"] = (sizes["kv_lora_rank"],), None
        if kind == "moe" or (kind == "deepseek" and at == 1):
            found[f"{layer}.mlp.gate.weight"] = (4, *hidden), None
        if kind == "deepseek" and at == 1:
            # vLLM keeps it in float32.
            found[f"{layer}.mlp.gate.e_score_correction_bias"] = (4,), torch.float32
    return found


def _of_all(tensors, dim):
    """One tensor from what ranks have, which is the same in all where they do not share the dim."""
    if dim is None:
        assert all(torch.equal(bytes_of(x), bytes_of(tensors[0])) for x in tensors)
        return tensors[0]
    return torch.cat(tensors, dim)


def codes_name(format):
    """The last part of the name of codes."""
    return "weight_packed" if format == "compressed_mxfp4" else "weight"


def _columns(key, format):
    return key == codes_name(format) or (key == scale_name(format) and format != "compressed_channel")


def bytes_of(x):
    return x.contiguous().view(-1).view(torch.uint8)


def unfused(engines, kind, format, expert_ranks=1):
    """The tensors of the stream, from the engines of all ranks."""
    ranks, found = len(engines), {}
    for layer in layers_of(kind):
        split = 1 if expert_ranks > 1 and layer.experts else ranks
        for key in (codes_name(format), scale_name(format), *(["bias"] if layer.bias else [])):
            block = 1 if key != scale_name(format) else blocks_of(format, (128, layer.k))[0]
            start = 0
            for part, (name, rows) in enumerate(layer.parts):
                copies = layer.copies(part, split)
                count = -(-(rows * copies // (split if layer.dim == 0 else 1)) // block)
                # A bias, and a scale for each row, have no columns.
                dim = layer.dim if layer.dim == 0 or _columns(key, format) else None
                for expert in range(layer.experts or 1):
                    local = layer.experts // expert_ranks
                    owners = [engines[expert // local]] if split < ranks else engines
                    mine = [each[layer.name + key] for each in owners]
                    mine = [(x[expert % local] if local else x)[start : start + count] for x in mine]
                    for at, x in enumerate(mine):
                        # Ranks that repeat heads have the same.
                        assert torch.equal(bytes_of(x), bytes_of(mine[at - at % copies]))
                    kept = mine[::copies]
                    found[name.replace("*", str(expert)) + key] = _of_all(kept, dim if len(kept) > 1 else None)
                start += count
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = torch.cat([each[name] for each in engines])
        assert not rows[VOCABULARY:].any()
        found[name] = rows[:VOCABULARY]
    return found | {name: _of_all([each[name] for each in engines], None) for name in _others(kind)}
