"""Families of transformers, tiny and random: ``python -m bench.inference.families``, on a CPU, in some minutes.

Each is converted and trained, stored, loaded by ``from_pretrained`` and made by ``from_config`` inside
``quantized_init``. The results are in ``bench/results/families.json``.
"""

import copy
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer

import tritonfp8
from tritonfp8.specs.testing import sqnr

RESULTS = Path(__file__).parents[1] / "results" / "families.json"
COMMAND = "python -m bench.inference.families"
RECIPES = ("blockwise", "mxfp8", "tensorwise", "rowwise_hp_grad_weight")
# Logits of a model in FP8 are as near to float32 as this, or bf16 is not, either.
LEAST_DB = 18.0
STEPS = 10
FAMILIES = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM",
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "OlmoForCausalLM",
    "Olmo2ForCausalLM", "GraniteForCausalLM", "CohereForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM",
    "GPTNeoXForCausalLM", "GPT2LMHeadModel", "GPTJForCausalLM", "OPTForCausalLM", "BloomForCausalLM",
    "FalconForCausalLM", "SmolLM3ForCausalLM", "HeliumForCausalLM", "GlmForCausalLM", "Glm4ForCausalLM",
    "MptForCausalLM", "MixtralForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM", "OlmoeForCausalLM",
    "GptOssForCausalLM", "BertForMaskedLM", "RobertaForMaskedLM", "ModernBertForMaskedLM",
    "T5ForConditionalGeneration", "BartForConditionalGeneration",
)  # fmt: skip
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "n_positions": 64, "n_head": 4,
    "n_layer": 2, "n_layers": 2, "n_heads": 4, "n_embd": 64, "d_model": 64, "d_ff": 96, "d_kv": 16, "num_heads": 4,
    "num_layers": 2, "num_decoder_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "ffn_dim": 96,
    "word_embed_proj_dim": 64,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "rotary_dim": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "q_lora_rank": 32, "kv_lora_rank": 32, "max_seq_len": 64,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 1, "sliding_window": 32,
    "query_pre_attn_scalar": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2,
    "cls_token_id": 1, "decoder_start_token_id": 0, "hidden_dropout": 0.0, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "dropout": 0.0, "dropout_rate": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
# Where those do not fit each other.
OTHERS = {
    "GptOssForCausalLM": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 4, "head_dim": 8},
    "FalconForCausalLM": {"num_kv_heads": 4},
    "Phi3ForCausalLM": {"head_dim": 16},
}


def config_of(name):
    """A small config of a class."""
    cls = getattr(transformers, name).config_class
    default = cls()
    known = {key: value for key, value in SIZES.items() if hasattr(default, key)}
    # What a config computes cannot be set.
    known = {key: value for key, value in known.items() if not isinstance(getattr(cls, key, None), property)}
    return cls(**{**known, **OTHERS.get(name, {})})


def made(name):
    """A random model of a class, in float32; biases are random, too."""
    torch.manual_seed(0)
    model = getattr(transformers, name)._from_config(config_of(name)).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "bias" in key:
                parameter.normal_(std=0.02)
    return model


def has_experts(name):
    """Whether the class is a mixture of experts."""
    return any(word in name for word in ("Moe", "Mixtral", "DeepseekV3", "Olmoe", "GptOss"))


def batch(model):
    """Tokens, and what the model needs beside them."""
    ids = torch.randint(3, 96, (2, 32), generator=torch.Generator().manual_seed(1))
    found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return {**found, "decoder_input_ids": ids} if model.config.is_encoder_decoder else found


def logits(model, inputs):
    """Of a forward."""
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits if "Bert" not in type(model).__name__ else model(**inputs).logits


def differing(found, expected):
    """The names of values of which two models have others."""
    theirs = found.state_dict()
    return [name for name, x in expected.state_dict().items() if not torch.equal(theirs[name], x)]


def trained(model, inputs):
    """The names of the trained weights that ten steps did not move."""
    model.train()
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    unused = set(before)
    for _ in range(STEPS):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        unused -= {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        optimizer.step()
        optimizer.zero_grad()
    # A token or an expert that no token of the batch takes has no gradient.
    return [name for name, p in model.named_parameters() if name in before and name not in unused
            and torch.equal(p, before[name])], sorted(unused)  # fmt: skip


def converted(name, recipe, plain, inputs, expected):
    """A model that follows a recipe: what its logits are worth, what verify says, and what training moves."""
    model = copy.deepcopy(plain)
    report = tritonfp8.convert(model, recipe)
    verified = tritonfp8.verify(model, on_failure="warn", **inputs)
    found = {"layers": len(report.converted), "logits_db": float(sqnr(logits(model, inputs), expected))}
    found["verified"] = verified.ok
    found["unmoved"], found["without_gradient"] = trained(model, inputs)
    return found


def stored(name, recipe, plain, inputs, expected, folder):
    """Models with weights in 8 bits, made in four ways: the values that differ from ``convert``'s."""
    cls = type(plain)
    first = copy.deepcopy(plain)
    tritonfp8.convert(first, recipe, mode="inference")
    found = {"logits_db": float(sqnr(logits(first, inputs), expected))}
    found["verified"] = tritonfp8.verify(first, on_failure="warn", **inputs).ok
    with tritonfp8.quantized_init(recipe):
        loaded = cls.from_pretrained(folder).eval()
    found["from_pretrained"] = differing(loaded, first)
    found["stored_by_from_pretrained"] = _kinds(loaded) == _kinds(first)
    found["same_logits"] = torch.equal(logits(loaded, inputs), logits(first, inputs))
    with tritonfp8.quantized_init(recipe):
        empty = cls._from_config(plain.config).eval()
    empty.load_state_dict(plain.state_dict())
    found["from_config"] = differing(empty, first)
    found["stored_by_from_config"] = _kinds(empty) == _kinds(first)
    trainable = copy.deepcopy(plain)
    tritonfp8.convert(trainable, recipe, weight_storage="quantized")
    found["trained"] = differing(trainable, first) if not has_experts(name) else []
    trainable.train()
    found["unmoved"] = _stored_moves(trainable, inputs)
    return found


def _kinds(model):
    return {name: type(p).__name__ for name, p in model.named_parameters()}


def _stored_moves(model, inputs):
    before = {name: x.clone() for name, x in model.state_dict().items()}
    moving = {name for name, p in model.named_parameters() if p.requires_grad}
    optimizer, touched = tritonfp8.optim.AdamW(model.parameters(), lr=1e-3), set()
    for _ in range(STEPS):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        touched |= {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        optimizer.step()
        optimizer.zero_grad()
    after = model.state_dict()
    return sorted(name for name in moving & touched if torch.equal(after[name], before[name]))


def faults(result):
    """What is wrong in the results of a family, as texts."""
    found = []
    for recipe, each in result["recipes"].items():
        least = min(LEAST_DB, result["bf16_db"])
        for what in ("converted", "stored"):
            if each[what]["logits_db"] < least:
                found.append(f"{recipe}, {what}: {each[what]['logits_db']:.1f} dB, bf16 {result['bf16_db']:.1f} dB")
            found += [f"{recipe}, {what}: verify fails"] * (not each[what]["verified"])
            found += [f"{recipe}, {what}: {name} did not move" for name in each[what]["unmoved"]]
        for how in ("from_pretrained", "from_config", "trained"):
            found += [f"{recipe}: {name} is another after {how}" for name in each["stored"][how]]
        for how in ("stored_by_from_pretrained", "stored_by_from_config", "same_logits"):
            found += [f"{recipe}: not {how}"] * (not each["stored"][how])
    return found


def run(name, recipes):
    """The results of a family."""
    start, plain = time.perf_counter(), made(name)
    inputs = batch(plain)
    expected = logits(plain, inputs)
    low = logits(copy.deepcopy(plain).bfloat16(), inputs)
    result = {"bf16_db": float(sqnr(low.float(), expected)), "recipes": {}}
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        for recipe in recipes:
            result["recipes"][recipe] = {
                "converted": converted(name, recipe, plain, inputs, expected),
                "stored": stored(name, recipe, plain, inputs, expected, folder),
            }
    result["seconds"] = round(time.perf_counter() - start, 1)
    return result


def main(only: Annotated[list[str], typer.Option(help="Families. [default: all]")] = []):  # noqa: B006
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    # Threads wait for each other longer than such small models compute.
    torch.set_num_threads(1)
    results = {}
    for number, name in enumerate(FAMILIES):
        if only and name not in only:
            continue
        try:
            results[name] = run(name, ("rowwise", RECIPES[number % len(RECIPES)]))
            wrong = results[name]["faults"] = faults(results[name])
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"]
            results[name] = {"faults": wrong}
        print(f"{name}: {'; '.join(wrong)[:600] or 'as expected'}, {results[name].get('seconds')} s", flush=True)
    if not only:
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        RESULTS.write_text(json.dumps({"command": COMMAND, "versions": versions, "families": results}, indent=1) + "\n")
    raise typer.Exit(any(each["faults"] for each in results.values()))


if __name__ == "__main__":
    typer.run(main)
