"""Train a small Qwen3 of torchtitan on text in FP8, sharded by torchtitan's FSDP2 and tensor parallelism.

    pip install -c constraints.txt -e ".[torchtitan]"
    torchrun --nproc-per-node 2 examples/torchtitan_train.py
    torchrun --nproc-per-node 2 examples/torchtitan_train.py --tp 2

The text is the source of Python's standard library, a token a byte, so nothing is downloaded. The loop is what
torchtitan's Trainer does, without its data sets, logs and checkpoints. Without GPUs the reference implementation runs,
which has the same numerics and no speed; ``on_cpus`` and ``without_flex_attention`` are for that only.
"""

import argparse
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # torchtitan takes CUDA where torch names no accelerator.
    torch._utils._get_available_device_type = lambda: "cpu"

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer

import tritonfp8
from tritonfp8.integrations.torchtitan import Float8Converter
from tritonfp8.training import corpus

BATCH, LENGTH, LAYERS = 4, 64, 2
DEVICE = "cuda" if HAS_GPU else "cpu"


def without_flex_attention(spec):
    """Flex attention has no backward on CPUs, and needs a mask."""
    for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())


def on_cpus(model):
    """Gloo adds gradients, and cannot scale them in the same call."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def build(config):
    """The sharded model and its parallel dims."""
    spec = config.model_spec
    titan.set_spmd_backend(config.parallelism.spmd_backend)
    dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    spec.model.update_from_config(config=config)
    with torch.device("meta"):
        model = spec.model.build()
    model = spec.parallelize_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
    )
    if not HAS_GPU:
        on_cpus(model)
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.train(), dims


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="rowwise", choices=tritonfp8.recipes.names())
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tp", type=int, default=1, help="degree of tensor parallelism; FSDP2 takes the other ranks")
    options = parser.parse_args()

    dist.init_process_group("nccl" if HAS_GPU else "gloo")
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("tritonfp8").setLevel(logging.INFO if dist.get_rank() == 0 else logging.WARNING)
    torch.manual_seed(0)

    # These two lines train in FP8.
    spec = model_registry("debugmodel", converters=[Float8Converter.Config(recipe=options.recipe)])
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", tensor_parallel_degree=options.tp)

    without_flex_attention(spec)
    spec.model.layers = spec.model.layers[:LAYERS]
    training = TrainingConfig(local_batch_size=BATCH, seq_len=LENGTH, disable_cuda_graphs=True)
    config = Trainer.Config(model_spec=spec, parallelism=parallelism, training=training)
    model, dims = build(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size).build(compile_config=config.compile)

    replicas = dist.get_world_size() // options.tp
    place = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    text = corpus.load().data.long()
    for step in range(options.steps):
        begin = (step * replicas + place) * BATCH * (LENGTH + 1)
        rows = text[begin : begin + BATCH * (LENGTH + 1)].view(BATCH, LENGTH + 1).to(DEVICE)
        # The mean over the tokens of all ranks: each rank's loss is its part of that mean.
        loss, _ = loss_fn(model(rows[:, :-1]), rows[:, 1:], torch.tensor(BATCH * LENGTH * replicas, device=DEVICE))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, options.steps // 5) == 0 or step == options.steps - 1:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"step {step}  loss {total.item() / options.tp:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
