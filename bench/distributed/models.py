"""Contestants of ``bench.distributed``: how each converts the model and shards it over the ranks."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tritonfp8
from bench.contest.peers import COMPILED_VERSIONS, torchao_layers
from bench.models import with_head
from tritonfp8 import recipes as known_recipes
from tritonfp8.distributed import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    enable_float8_all_gather,
    enable_float8_reduce_scatter,
)

BASELINE = "bf16"
GATHER, TP, ALONE, AGAIN = "FP8 all-gather", "TP", "one process", "again"
TP_WAYS = (TP, f"{TP}, DTensors between layers", f"{TP}, FP8 styles")
WAYS = dict(zip(("torch", "dtensors", "float8"), TP_WAYS, strict=True))
OTHER_ORDER = "another order of sums"
REORDERED = f"{ALONE}, {OTHER_ORDER}"
ORDER_SEED = 0
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
REDUCTIONS = ("reduced in float32", "reduced in bfloat16", "reduced in 8 bits")
STORED = "stored in 8 bits"
TORCHAO_GATHER, TORCHAO_ROWWISE = f"torchao tensorwise, {GATHER}", "torchao rowwise"
ATTENTION = "causal_sdpa"
Styles = tuple[type[ColwiseParallel], type[RowwiseParallel], type[PrepareModuleInput]]
TORCH_STYLES: Styles = (ColwiseParallel, RowwiseParallel, PrepareModuleInput)
FLOAT8_STYLES: Styles = (Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput)


@dataclass(frozen=True)
class Meshes:
    """The device meshes of FSDP and tensor parallelism.

    Attributes:
        dp: ranks that share the batch.
        tp: ranks that share a layer, or None.
        alone: this rank only, or None.
    """

    dp: DeviceMesh
    tp: DeviceMesh | None = None
    alone: DeviceMesh | None = None

    @classmethod
    def make(cls, device_type: str, dp: int, tp: int, alone: bool) -> "Meshes":
        """Make the meshes. Collective: every rank passes the same arguments."""
        grid = init_device_mesh(device_type, (dp, tp), mesh_dim_names=("dp", "tp"))
        single = init_device_mesh(device_type, (dp * tp, 1), mesh_dim_names=("copies", "alone")) if alone else None
        return cls(grid["dp"], grid["tp"] if tp > 1 else None, single["alone"] if single else None)


@dataclass(frozen=True)
class Contestant:
    """One implementation in the comparison.

    Attributes:
        name: its name in the tables.
        convert: converts the linear layers, before anything is sharded.
        baseline: the bf16 contestant with the same sharding.
        own: whether it is of this package.
        after_step: called after each optimizer step, as its users would.
        styles: styles of tensor parallelism, or None without it.
        dtensors: whether the MLP's first layers return DTensors (``use_local_output=False``).
        alone: whether each rank trains on the whole batch by itself.
        moments: how ``tritonfp8.optim.AdamW`` stores the moments of weights that are stored in 8 bits; None is torch's
            AdamW.
        experts: whether experts are over ranks. In each step they get other numbers of rows.
        obstacle: why it cannot take part, or None.
        reduce_dtype: the dtype in which gradients are reduced.
        codes: whether gradients are sent in 8 bits.
    """

    name: str
    convert: Callable[[nn.Module], Any]
    baseline: str = BASELINE
    own: bool = False
    after_step: Callable[[nn.Module], Any] = lambda model: None
    styles: Styles | None = None
    dtensors: bool = False
    alone: bool = False
    moments: str | None = None
    experts: bool = False
    obstacle: str | None = None
    reduce_dtype: torch.dtype = torch.float32
    codes: bool = False


def _leave(model: nn.Module) -> None:
    """Do not convert."""


def _converter(recipe: str, gather: bool = False, stored: bool = False) -> Callable[[nn.Module], None]:
    def convert(model: nn.Module) -> None:
        tritonfp8.convert(model, with_head(recipe), weight_storage="quantized" if stored else "parameters")
        if gather:
            enable_float8_all_gather(model)

    return convert


def _shuffled(size: int, block: int, generator: torch.Generator) -> torch.Tensor:
    """A permutation of ``range(size)`` that permutes whole blocks, and the elements inside each block."""
    count = size // block
    blocks = torch.randperm(count, generator=generator)
    inside = torch.rand(count, block, generator=generator).argsort(dim=1)
    rest = torch.randperm(size % block, generator=generator)
    return torch.cat([(blocks[:, None] * block + inside).flatten(), count * block + rest])


@torch.no_grad()
def reorder_sums(model: nn.Module, block: int = 1) -> None:
    """Permute the hidden dim of each MLP of a Llama in place, equally on every rank.

    The model computes the same function, but ``down_proj`` and the gradient of the MLP's input sum in another order.

    Args:
        model: a transformers Llama, not yet converted.
        block: neighbours in the hidden dim that may share a scale. They stay together, so that scales do not change.
    """
    generator = torch.Generator().manual_seed(ORDER_SEED)
    for layer in model.model.layers:
        mlp = layer.mlp
        down = mlp.down_proj.weight
        order = _shuffled(down.shape[1], block, generator).to(down.device)
        down.copy_(down[:, order])
        for parameter in (*mlp.gate_proj.parameters(), *mlp.up_proj.parameters()):
            parameter.copy_(parameter[order])


def _largest_block(recipe: str) -> int:
    """Largest number of neighbours that share a scale, apart from whole dims."""
    found = known_recipes.get(recipe)
    operands = [spec for gemm in (found.output, found.grad_input, found.grad_weight) for spec in (gemm.lhs, gemm.rhs)]
    return max([1, *(size for spec in operands if spec is not None for size in spec.block)])


def _in_other_order(recipe: str, convert: Callable[[nn.Module], Any]) -> Callable[[nn.Module], None]:
    block = _largest_block(recipe)

    def reordered(model: nn.Module) -> None:
        reorder_sums(model, block)
        convert(model)

    return reordered


def fsdp_contestants(
    recipes: tuple[str, ...], peers: bool, again: bool, moments: tuple[str, ...] = ()
) -> list[Contestant]:
    """bf16, each recipe with a gather in bf16 and in 8 bits, and torchao. ``again`` runs bf16 twice, as a control.

    ``moments`` adds weights that are stored in 8 bits and trained without masters, by each format of moments.
    """
    found = [Contestant(BASELINE, _leave)]
    if again:
        found.append(Contestant(f"{BASELINE}, {AGAIN}", _leave))
    for recipe in recipes:
        found.append(Contestant(recipe, _converter(recipe), own=True))
        found.append(Contestant(f"{recipe}, {GATHER}", _converter(recipe, gather=True), own=True))
        found += [
            Contestant(f"{recipe}, {STORED}, {each} moments", _converter(recipe, stored=True), own=True, moments=each)
            for each in moments
        ]
    return [*found, *(torchao_contestants() if peers else ())]


def has_torchao() -> bool:
    """Whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


def torchao_contestants() -> list[Contestant]:
    """torchao's recipes: tensorwise, gathered in FP8, and rowwise, gathered in bf16."""

    def precompute(model: nn.Module) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)

    obstacle = None if has_torchao() else "torchao is not installed"
    return [
        Contestant(
            TORCHAO_GATHER,
            lambda model: torchao_layers(model, "tensorwise", enable_fsdp_float8_all_gather=True),
            after_step=precompute,
            obstacle=obstacle,
        ),
        Contestant(TORCHAO_ROWWISE, lambda model: torchao_layers(model, "rowwise"), obstacle=obstacle),
    ]


def reduction_contestants(recipe: str) -> list[Contestant]:
    """One recipe, whose gradients are reduced in float32, in bfloat16, and in 8 bits to float32 sums."""
    convert = _leave if recipe == BASELINE else _converter(recipe, gather=True)
    baseline = REDUCTIONS[0]
    ways = zip(REDUCTIONS, (torch.float32, torch.bfloat16, torch.float32), strict=True)
    return [
        Contestant(
            name, convert, baseline, own=name == REDUCTIONS[-1], reduce_dtype=dtype, codes=name == REDUCTIONS[-1]
        )
        for name, dtype in ways
    ]


def tp_contestants(recipes: tuple[str, ...], alone: bool, chosen: tuple[str, ...] = tuple(WAYS)) -> list[Contestant]:
    """bf16, and each recipe with torch's styles (local tensors, DTensors) and with the FP8 styles, as :data:`WAYS`.

    ``alone`` adds each in one process, and in one process with sums in another order, as a control.
    """
    baseline = f"{BASELINE}, {TP}"
    found = [Contestant(baseline, _leave, baseline, styles=TORCH_STYLES)]
    for recipe in recipes:
        for way in chosen:
            styles = FLOAT8_STYLES if way == "float8" else TORCH_STYLES
            name = f"{Path(recipe).stem}, {WAYS[way]}"
            found.append(
                Contestant(name, _converter(recipe), baseline, own=True, styles=styles, dtensors=way == "dtensors")
            )
    if alone:
        found += _alone(BASELINE, _leave, own=False)
        for recipe in recipes:
            found += _alone(recipe, _converter(recipe), own=True)
    return found


def _alone(recipe: str, convert: Callable[[nn.Module], Any], own: bool) -> list[Contestant]:
    ways = {ALONE: convert, REORDERED: _in_other_order(recipe, convert)}
    baseline = f"{BASELINE}, {ALONE}"
    return [Contestant(f"{recipe}, {how}", way, baseline, own=own, alone=True) for how, way in ways.items()]


def attend_causally(model: nn.Module) -> None:
    """Make attention causal by a flag, without a mask.

    To find out that no mask is needed, transformers reads the token positions in each step, which waits for the GPU.
    With sharded tokens it would make a mask of the wrong size.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(ATTENTION, sdpa_attention_forward)
    model.set_attn_implementation(ATTENTION)


def clip_gradients(model: nn.Module, limit: float, parts: DeviceMesh | None = None) -> None:
    """Scale the gradients in place so that their norm over all ranks is at most ``limit``, after :func:`sum_parts`.

    torch's ``clip_grad_norm_`` takes the gradients of one mesh only; experts over ranks have a mesh of their own.
    """
    if parts is not None:
        sum_parts(model, parts)
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.grad is not None:
            meshes.setdefault(getattr(parameter.grad, "device_mesh", None), []).append(parameter)
    if len(meshes) <= 1:
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        return
    norms = [nn.utils.get_total_norm([p.grad for p in each if p.grad is not None]) for each in meshes.values()]
    total = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    for each in meshes.values():
        nn.utils.clip_grads_with_norm_(each, limit, total)


def spread(model: nn.Module, contestant: Contestant, meshes: Meshes, compile: bool) -> None:
    """Shard a converted Llama or mixture in place: tensor parallelism, compiled layers, FSDP2 on each and the root."""
    if contestant.styles is not None:
        assert meshes.tp is not None
        plan = mixture_plan if contestant.experts else llama_plan
        parallelize_module(model, meshes.tp, plan(len(model.model.layers), contestant.styles, contestant.dtensors))
    mesh = meshes.alone if contestant.alone else meshes.dp
    policy = replace(POLICY, reduce_dtype=contestant.reduce_dtype)
    for name, layer in list(model.model.layers.named_children()):
        if compile:
            # With None, sizes that change are symbols from their second value on.
            layer = compiled(layer, model.device.type, None if contestant.experts else False)
            model.model.layers.register_module(name, layer)
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    if contestant.codes:
        enable_float8_reduce_scatter(model)


def compiled(layer: nn.Module, device_type: str, dynamic: bool | None = False) -> nn.Module:
    """A compiled decoder layer. On a CPU it is only traced, which needs no compiler."""
    torch._dynamo.config.recompile_limit = COMPILED_VERSIONS
    return torch.compile(layer, backend="inductor" if device_type == "cuda" else "aot_eager", dynamic=dynamic)


def llama_plan(layers: int, styles: Styles, dtensors: bool) -> dict[str, Any]:
    """Plan of tensor and sequence parallelism for a transformers Llama; every rank gets whole logits."""
    colwise, rowwise, prepare = styles
    whole, tokens = Replicate(), Shard(1)
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=tokens),
        "model.norm": SequenceParallel(),
        "lm_head": colwise(input_layouts=tokens, output_layouts=whole),
    }
    for index in range(layers):
        at = f"model.layers.{index}"
        plan |= {
            f"{at}.input_layernorm": SequenceParallel(),
            f"{at}.post_attention_layernorm": SequenceParallel(),
            f"{at}.self_attn": prepare(
                input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": whole}
            ),
            f"{at}.mlp": prepare(input_layouts=(tokens,), desired_input_layouts=(whole,)),
            f"{at}.self_attn.o_proj": rowwise(output_layouts=tokens),
            f"{at}.mlp.down_proj": rowwise(output_layouts=tokens),
        }
        plan |= {f"{at}.self_attn.{name}": colwise() for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {f"{at}.mlp.{name}": colwise(use_local_output=not dtensors) for name in ("gate_proj", "up_proj")}
    return plan


def mixture_plan(layers: int, styles: Styles, dtensors: bool = False) -> dict[str, Any]:
    """Plan of tensor parallelism for a transformers Qwen3-MoE: attention over heads, experts over the ranks' tokens.

    Every rank has whole logits. Norms and routers of a rank read its part of the tokens, or heads: :func:`sum_parts`
    makes their gradients whole.
    """
    colwise, rowwise, prepare = styles
    whole, tokens = Replicate(), Shard(1)
    plan: dict[str, Any] = {
        name: PrepareModuleInput(input_layouts=(came,), desired_input_layouts=(wanted,), use_local_output=True)
        for name, came, wanted in (("model.layers.0", whole, tokens), ("model.norm", tokens, whole))
    }
    for index in range(layers):
        at = f"model.layers.{index}.self_attn"
        plan |= {f"{at}.{name}": colwise(use_local_output=not dtensors) for name in ("q_proj", "k_proj", "v_proj")}
        plan[at] = prepare(
            input_kwarg_layouts={"hidden_states": tokens}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        plan[f"{at}.o_proj"] = rowwise(output_layouts=tokens)
    return plan


def sum_parts(model: nn.Module, tp: DeviceMesh) -> None:
    """Sum the gradients of norms and routers over the ranks of tensor parallelism, in place (:func:`mixture_plan`)."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and any(part in name for part in ("layernorm", "q_norm", "k_norm", "mlp.gate.")):
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            torch.distributed.all_reduce(grad, group=tp.get_group())
