"""The kinds of adapters that peft has, each with the arguments of its config."""

from functools import partial

import peft
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.lora.config import CordaConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga

# Adapters that change nothing at first get random numbers, where they take an argument for that.
_LINEAR = {"target_modules": ["q_proj", "o_proj"]}
_RANDOM = _LINEAR | {"init_weights": False}
_LORA = _LINEAR | {"init_lora_weights": False}
_PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
_CPT = {"cpt_token_ids": [3, 4, 5], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 4]}
_IA3 = {"feedforward_modules": [], "init_ia3_weights": False}

# By peft's name of the kind, and of its variants after a colon.
KINDS = {
    "LORA": _LORA, "LORA:dora": _LORA | {"use_dora": True}, "LORA:rslora": _LORA | {"use_rslora": True},
    "LORA:gaussian": _LINEAR | {"init_lora_weights": "gaussian"},
    "LORA:orthogonal": _LINEAR | {"init_lora_weights": "orthogonal"},
    "LORA:mica": _LINEAR | {"init_lora_weights": "mica"}, "LORA:pissa": _LINEAR | {"init_lora_weights": "pissa"},
    "LORA:pissa_niter": _LINEAR | {"init_lora_weights": "pissa_niter_4"},
    "LORA:qalora": _LORA | {"use_qalora": True, "qalora_group_size": 16},
    "LORA:kasa": _LINEAR | {"kasa_config": peft.KasaConfig()}, "LORA:velora": _LORA | {"velora_config": {}},
    "ADALORA": _LORA | {"total_step": 10}, "ADAMSS": _LINEAR,
    "ADAPTION_PROMPT": {"task_type": "CAUSAL_LM", "adapter_len": 4, "adapter_layers": 1},
    "BEFT": _LINEAR, "BOFT": _RANDOM | {"boft_block_size": 4}, "C3A": _RANDOM | {"block_size": 16},
    "CARTRIDGE": _PROMPT | {"num_frozen_tokens": 1}, "CPT": {"task_type": "CAUSAL_LM", **_CPT}, "DEFT": _LINEAR,
    "DELORA": _RANDOM, "FOURIERFT": _RANDOM | {"n_frequency": 50}, "FROD": _LINEAR | {"progressbar": False},
    "GRALORA": _RANDOM, "HIRA": _RANDOM, "HRA": _RANDOM, "IA3": _LINEAR | _IA3,
    "IA3:feedforward": _IA3 | {"target_modules": ["down_proj"], "feedforward_modules": ["down_proj"]},
    "LILY": _LINEAR, "LN_TUNING": {"target_modules": ["input_layernorm"]}, "LOHA": _RANDOM, "LOKR": _RANDOM,
    "MISS": _RANDOM, "MISS:bat": _LINEAR | {"init_weights": "bat"}, "MISS:mini": _LINEAR | {"init_weights": "mini"},
    "MULTITASK_PROMPT_TUNING": _PROMPT | {"num_tasks": 2}, "OFT": _RANDOM | {"oft_block_size": 16, "r": 0},
    "OSF": _LINEAR | {"effective_rank": 8}, "PEANUT": _LINEAR,
    "POLY": _LINEAR | {"task_type": "CAUSAL_LM", "n_tasks": 2},
    "PREFIX_TUNING": _PROMPT, "PROMPT_TUNING": _PROMPT, "PSOFT": _LINEAR | {"r": 8}, "PVERA": _LINEAR,
    "P_TUNING": _PROMPT | {"encoder_hidden_size": 16}, "RANDLORA": _LINEAR, "ROAD": _RANDOM, "SHADOW": {},
    "SUPERTUNING": _LINEAR, "TINYLORA": _LINEAR,
    "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"], "token_indices": [3, 4, 5]}, "UNILORA": _LINEAR,
    "VBLORA": _LINEAR | {"vector_length": 16, "num_vectors": 8}, "VERA": _LINEAR,
    "WAVEFT": _RANDOM | {"n_frequency": 50}, "XLORA": {"task_type": "CAUSAL_LM", "hidden_size": 128},
}  # fmt: skip
# The kinds and variants that a frozen base in 8 bits refuses, and a part of the error.
REFUSED = {
    "GLORA": (_LINEAR, ValueError, "GLoRA does not support this layer type"),
    "LORA:olora": (_LINEAR | {"init_lora_weights": "olora"}, NotImplementedError, r"or use tritonfp8\.revert\(model\)"),
    "SHIRA": (_RANDOM | {"r": 4}, NotImplementedError, r"or use tritonfp8\.revert\(model\)"),
}  # fmt: skip
# peft itself does not merge these, or only into layers with a bias.
UNMERGED = {"BEFT", "LILY", "POLY", "SHADOW", "XLORA"}
# What a row of a batch has beside its tokens.
COLUMNS = {"MULTITASK_PROMPT_TUNING": {"task_ids": 1}, "POLY": {"task_ids": 1}}


def adapted(base, kind, folder):
    """A base with adapters of a kind, all from one seed; X-LoRA mixes two, which are written to ``folder``."""
    options = KINDS.get(kind) or REFUSED.get(kind, ({},))[0]
    if kind == "XLORA":
        options = options | {"adapters": {str(i): str(folder / str(i)) for i in range(2)}}
        base.config.use_cache = False
        for i, path in enumerate(options["adapters"].values()):
            torch.manual_seed(i)
            made = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **_LORA))
            made.save_pretrained(path)
            base = made.unload()
    torch.manual_seed(0)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind.partition(":")[0])](**options)
    return peft.get_peft_model(base, config)


def _eva(base, config, batch):
    model = peft.get_peft_model(base, config(eva_config=peft.EvaConfig(rho=1.0)))
    peft.initialize_lora_eva_weights(model, [batch] * 4, show_progress_bar=False)
    return model


def _corda(base, config, batch):
    found = config(corda_config=CordaConfig(corda_method="kpm"))
    # It takes one row at a time.
    preprocess_corda(base, found, run_model=lambda: base(batch["input_ids"][:1]))
    return peft.get_peft_model(base, found)


def _lora_ga(base, config, batch):
    found = config(lora_ga_config=peft.LoraGAConfig())
    preprocess_loraga(base, found, lambda: base(**batch).loss.backward())
    return peft.get_peft_model(base, found)


INITS = {"eva": _eva, "corda": _corda, "lora_ga": _lora_ga}
"""Initializations of LoRA that read activations, gradients and the values of the base, by peft's name."""


def initialized(base, init, ids):
    """A base with LoRA by one of :data:`INITS`, from one seed."""
    torch.manual_seed(0)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    return INITS[init](base, partial(peft.LoraConfig, r=4, init_lora_weights=init, **_LINEAR), batch)


def kind_names(table):
    """peft's names of the kinds in a table."""
    return {kind.partition(":")[0] for kind in table}
