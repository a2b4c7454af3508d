"""Functions of each rank in the tests of torchtitan. Each returns plain data.

torchtitan runs on GPUs. Three of its parts are replaced here, as CPUs and gloo lack what they need: the device, the
attention (flex attention has no backward on CPUs), and the scaled reduction of gradients (gloo only sums).
"""

from __future__ import annotations

import zlib

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

from tritonfp8.compat.counting import count_gemms
from tritonfp8.distributed import count_collective_bytes
from tritonfp8.layers.linear import Float8Linear
from tritonfp8.layers.moe import is_converted_experts

LAYERS, BATCH, LENGTH = 2, 2, 16
HEAD = {"*lm_head": "rowwise", "*": "rowwise"}


def _use_cpus():
    """torchtitan asks torch for the accelerator when it is imported, and takes CUDA on a machine without any."""
    torch._utils._get_available_device_type = lambda: "cpu"


def spec_of(flavor, converters, family="qwen3"):
    """The spec of a debug model with two layers, and attention that trains on CPUs."""
    _use_cpus()
    from torchtitan.models import llama3, qwen3
    from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

    spec = {"qwen3": qwen3, "llama3": llama3}[family].model_registry(flavor, attn_backend="flex", converters=converters)
    spec.model.layers = spec.model.layers[:LAYERS]
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())
    return spec


def config_of(spec, parallelism, dtype="float32", checkpointing=None, compiled=False):
    """torchtitan's config of a run."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    return Trainer.Config(
        model_spec=spec,
        parallelism=ParallelismConfig(**{"spmd_backend": "partial_dtensor", **parallelism}),
        training=TrainingConfig(
            local_batch_size=BATCH,
            seq_len=LENGTH,
            mixed_precision_param=dtype,
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
        ),
        activation_checkpoint=checkpointing,
        compile=CompileConfig(enable=compiled, backend="aot_eager"),
    )


def model_of(config, world):
    """The model and its parallel dims, made as torchtitan's Trainer makes them."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend

    spec = config.model_spec
    set_spmd_backend(config.parallelism.spmd_backend)
    dims = ParallelDims.from_config(config.parallelism, world)
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model.verify_module_protocol()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train(), dims


def set_weights(model):
    """Give the model the same weights however it is sharded: torchtitan's own depend on the shards."""
    full = {}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(parameter.shape, generator=generator) / 16
        full[name] = torch.ones_like(drawn) if parameter.ndim == 1 else drawn
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True, strict=False))


def _whole(parameter):
    return parameter.detach().full_tensor().clone() if hasattr(parameter, "full_tensor") else parameter.detach().clone()


def _converters(recipe, gather, payload="float8"):
    from tritonfp8.integrations.torchtitan import Float8Converter

    return None if recipe is None else [Float8Converter.Config(recipe=recipe, all_gather=gather, payload=payload)]


def _policy(name):
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    return {None: None, "full": FullAC.Config(), "selective": SelectiveAC.Config()}[name]


def _batch(vocabulary, step, place):
    generator = torch.Generator().manual_seed(1000 * step + place)
    tokens = torch.randint(vocabulary, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _loss_of(config, model, chunked):
    """torchtitan's loss, or its loss in chunks of tokens, which calls the head itself as its Trainer has it do."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss

    plain = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    if not chunked:
        return plain.build(compile_config=config.compile)
    model._skip_lm_head = True
    loss_fn = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=plain).build(compile_config=config.compile)
    loss_fn.set_lm_head(model.lm_head)
    return loss_fn


def _step(model, loss_fn, batch, tokens):
    """One forward and backward; ``tokens`` is their number on all ranks. Returns the loss and the placements."""
    logits = model(batch[0])
    loss, _ = loss_fn(logits, batch[1], torch.tensor(tokens))
    loss.backward()
    return loss.detach().item(), str(getattr(logits, "placements", None))


def train(
    mesh, parallelism, flavor="debugmodel", family="qwen3", recipe="rowwise", gather=None, dtype="float32",
    checkpointing=None, compiled=False, steps=3, rate=1e-3, chunked=False, same_weights=False,
    payload="float8",
):  # fmt: skip
    """Train for a few steps.

    Returns:
        ``losses`` of this rank; ``stuck``, the parameters that did not change; ``wrong``, the parameters whose gradient
        was not finite; ``converted``, the number of layers, and ``experts``, the number of modules of experts;
        ``gemms`` of the last step, and ``gathered`` and ``sent``, its bytes; ``placements`` of the logits; ``saving``,
        the class of the activation checkpointing.
    """
    _use_cpus()
    torch.manual_seed(0)
    spec = spec_of(flavor, _converters(recipe, gather, payload), family)
    config = config_of(spec, parallelism, dtype, _policy(checkpointing), compiled)
    model, dims = model_of(config, mesh.size())
    if same_weights:
        set_weights(model)
    before = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    loss_fn = _loss_of(config, model, chunked)
    place = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    losses, wrong, placements = [], set(), None
    for step in range(steps):
        batch = _batch(spec.model.vocab_size, step, place)
        with count_gemms() as gemms, count_collective_bytes() as traffic:
            loss, placements = _step(model, loss_fn, batch, BATCH * LENGTH * mesh.size() // dims.tp)
        losses.append(loss)
        wrong |= {n for n, p in model.named_parameters() if p.grad is not None and not _whole(p.grad).isfinite().all()}
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "stuck": [name for name, p in model.named_parameters() if torch.equal(_whole(p), before[name])],
        "wrong": sorted(wrong),
        "converted": sum(isinstance(module, Float8Linear) for module in model.modules()),
        "experts": sum(is_converted_experts(module) for module in model.modules()),
        "gemms": gemms.calls.total(),
        "gathered": traffic.bytes["all_gather"],
        "sent": traffic.bytes["all_to_all"],
        "placements": placements,
        "saving": type(config.activation_checkpoint).__qualname__,
    }
