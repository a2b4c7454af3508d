"""Families and checkpoints that loaders read, and the loaders of ranks."""

import torch
import transformers
from mixtures import COMMON, FAMILIES
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import tritonfp8
from tritonfp8.layers.stored import plain_weight, stored_part

SIZES = {
    "qwen3": {"intermediate_size": 96, "head_dim": 16},
    "llama": {"intermediate_size": 96},
    "qwen3_moe": FAMILIES["qwen3_moe"],
    "deepseek_v3": FAMILIES["deepseek_v3"],
}


def config_of(family):
    return transformers.AutoConfig.for_model(family, **{**COMMON, **SIZES[family]})


def has_experts(family):
    return "num_experts_per_tok" in SIZES[family] or family in FAMILIES


def plain(family, device="cpu"):
    """A model in high precision, whose values no initialization makes."""
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config_of(family))
    if device == "cpu":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def quantized(family, device, recipe="rowwise"):
    """A model of the family whose weights are stored as its layers are made."""
    with tritonfp8.quantized_init(recipe):
        return plain(family, "meta") if device == "meta" else transformers.AutoModelForCausalLM.from_config(
            config_of(family)
        )  # fmt: skip


def stored_after(model, family, recipe="rowwise"):
    """The model, loaded in high precision and then stored: what a loader must give."""
    tritonfp8.convert(model, recipe, mode="inference")
    return model


def differing(found, expected):
    """The names of tensors of which two models have other values, or which only one of them stores."""
    theirs = dict(found.named_parameters())
    names = []
    for name, parameter in expected.named_parameters():
        values = [plain_weight(each.detach()) for each in (theirs[name], parameter)]
        same = values[0].dtype == values[1].dtype and not values[0].is_meta
        same = same and torch.equal(*(x.full_tensor() if isinstance(x, DTensor) else x for x in values))
        if not same or (stored_part(theirs[name]) is None) != (stored_part(parameter) is None):
            names.append(name)
    return names


def materialised(mesh, family, recipe):
    """The parameters that are wrong after each way to load a model that was sharded on the meta device."""
    state = plain(family).state_dict()
    expected = stored_after(plain(family), family, recipe)

    def sharded():
        model = quantized(family, "meta", recipe)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def parts(model):
        mine = model.state_dict()
        cut = {name: x for name, x in state.items() if isinstance(mine[name], DTensor)}
        return {**state, **{n: distribute_tensor(x, mesh, mine[n].placements) for n, x in cut.items()}}

    def whole(model):
        model.to_empty(device=mesh.device_type)
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))

    def copied(model):
        model.to_empty(device=mesh.device_type)
        model.load_state_dict(parts(model))

    def assigned(model):
        model.load_state_dict(parts(model), assign=True)

    wrong = {}
    for load in (whole, copied, assigned):
        model = sharded()
        load(model)
        wrong[load.__name__] = differing(model, expected)
    return wrong
