"""Small models that make_exact changed, and the log-probs of their tokens, computed in many ways."""

import pytest
import torch
import transformers
from rollout_models import FAMILIES, IDS, MASK, OPTIONS, plain
from transformers import DynamicCache, StaticCache

import tritonfp8
from tritonfp8.rollout import log_probs, make_exact, why_inexact

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))
LENGTHS = (23, 9, 17)
SIZES = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 128}
# More than rollout_models has: the class, and what its config adds.
OTHERS = {
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma": ("Gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
    "gemma3": (
        "Gemma3",
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6, "query_pre_attn_scalar": 32},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}),
    "olmoe": ("Olmoe", {**_EXPERTS, "intermediate_size": 128, "clip_qkv": 0.5}),
}
CONFIGS = {"gemma3": "Gemma3TextConfig"}


def of_family(kind, dtype=torch.bfloat16, **options):
    """A model of any family with weights of one size."""
    if kind in FAMILIES:
        return plain(kind, dtype, **{"num_key_value_heads": 2, "max_position_embeddings": 64, **options})
    name, more = OTHERS[kind]
    config = getattr(transformers, CONFIGS.get(kind, f"{name}Config"))(**{**SIZES, **more, **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.05)
    return model


def exact(kind="qwen3", recipe="rowwise", dtype=torch.bfloat16, device="cpu", **options):
    """A model whose tokens have bits of their own; ``recipe`` None: without FP8."""
    model = of_family(kind, dtype, **options)
    if recipe is not None:
        tritonfp8.convert(model, recipe, batch_invariant=True)
    make_exact(model.to(device))
    assert why_inexact(model) == {}
    return model


def sequences(lengths=LENGTHS, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (n,), generator=generator).to(device) for n in lengths]


def padded(rows, side):
    """Rows of ids in a batch, and its mask."""
    longest = max(map(len, rows))
    ids, mask = (rows[0].new_zeros(len(rows), longest) for _ in range(2))
    for i, row in enumerate(rows):
        at = slice(longest - len(row), None) if side == "left" else slice(len(row))
        ids[i, at], mask[i, at] = row, 1
    return ids, mask


def positions(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


@torch.no_grad()
def alone(model, rows):
    """Logits of each row by itself, without a mask."""
    return [model(row[None], use_cache=False).logits[0] for row in rows]


def together(model, rows, side):
    """Logits of the tokens of each row, from one batch."""
    ids, mask = padded(rows, side)
    out = model(ids, attention_mask=mask, position_ids=positions(mask), use_cache=False).logits.detach()
    return [each[seen.bool()] for each, seen in zip(out, mask, strict=True)]


@torch.no_grad()
def in_chunks(model, rows, chunks, static):
    """The same through a cache, which grows or (``static``) has room for more tokens than there are."""
    ids, mask = padded(rows, "left")
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=ids.shape[1] + 5) if static else DynamicCache(config=config)
    place, found, at = positions(mask), [], 0
    for size in chunks:
        part = slice(at, at + size)
        found.append(
            model(
                ids[:, part],
                attention_mask=mask[:, : at + size],
                position_ids=place[:, part],
                past_key_values=cache,
                use_cache=True,
            ).logits
        )
        at += size
    return [each[seen.bool()] for each, seen in zip(torch.cat(found, 1), mask, strict=True)]


def same(one, two):
    return all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def grpo_steps(model, rollout, steps=2, rate=3e-2, seed=0):
    """Steps of policy gradients on what the rollout generates; the importance ratios of each."""
    device, ratios = next(rollout.model.parameters()).device, []
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        options = OPTIONS | {"seed": 100 * seed + step, "temperature": 0.8, "max_new_tokens": 8}
        made = rollout.generate(IDS.to(device), MASK.to(device), **options)
        advantages = (made.sequences[:, -8:].float().mean(1) / 64).to(device)
        with rollout.computing():
            scored = log_probs(model, made.sequences, made.attention_mask, made.mask.shape[1], 0.8)
        ratios.append((scored - made.log_probs).exp())
        (-(ratios[-1] * (advantages - advantages.mean())[:, None] * made.mask).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        rollout.refresh()
    return [ratio.detach() for ratio in ratios]
