"""A mixture of transformers on ranks: attention over pairs of them, experts over all."""

import copy

import mixtures
import torch
import torch.distributed as dist
from stored_models import whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import tritonfp8
from bench.distributed.models import TORCH_STYLES, mixture_plan, sum_parts
from tritonfp8.distributed import shard_experts

LENGTH, STEPS, TP = 8, 3, 2


def _train(model, batches, reduce=lambda: None):
    """Losses, and the gradients of the first step."""
    # On GPUs torch steps all parameters together, and refuses DTensors beside plain tensors.
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)
    losses, grads = [], {}
    for tokens in batches:
        loss = nn.functional.cross_entropy(
            model(input_ids=tokens[:, :-1], use_cache=False).logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        loss.backward()
        reduce()
        grads = grads or {name: whole(p.grad).clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), grads


def against_one_process(mesh, recipe, average):
    """Losses of one process and of the ranks; how far each gradient is off; the parameters that are stuck.

    ``average`` is the argument of ``shard_experts``.
    """
    square = init_device_mesh(mesh.device_type, (mesh.size() // TP, TP), mesh_dim_names=("dp", "tp"))
    dp, tp = square["dp"], square["tp"]
    model = mixtures.model_of("qwen3_moe").to(mesh.device_type)
    tritonfp8.convert(model, recipe)
    single, first = copy.deepcopy(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(5)
    batches = [
        torch.randint(96, (dp.size(), LENGTH + 1), generator=generator).to(mesh.device_type) for _ in range(STEPS)
    ]
    expected, expected_grads = _train(single, batches)

    parallelize_module(model, tp, mixture_plan(len(model.model.layers), TORCH_STYLES))
    shard_experts(model, mesh, "high_precision", average_gradients=average)

    def reduce():
        sum_parts(model, tp)
        for name, parameter in model.named_parameters():
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            if "experts" not in name:
                dist.all_reduce(grad, group=dp.get_group())
                grad /= dp.size()

    rank = dp.get_local_rank()
    losses, grads = _train(model, [tokens[rank : rank + 1] for tokens in batches], reduce)
    dist.all_reduce(losses, group=dp.get_group())
    off = {name: ((grads[name] - g).norm() / g.norm()).item() for name, g in expected_grads.items()}
    stuck = [name for name, p in model.named_parameters() if torch.equal(whole(p), first[name])]
    return expected.tolist(), (losses / dp.size()).tolist(), off, stuck
