"""The functions of each rank in the tests of whole decoder layers with experts over ranks."""

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from bench.distributed import experts
from bench.distributed.experts import Contestant, LayerSettings
from bench.distributed.models import clip_gradients
from bench.distributed.ranks import Ranks
from tritonfp8 import Float8Linear


def settings_of(size, tp=1, **settings):
    fixed = {"batch_size": 2, "seq_len": 24, "peers": False, "data": __file__, "find_unchanged": True}
    return LayerSettings(
        "tiny", **{"recipes": ("rowwise",), "steps": 3, "dp": size // tp, "tp": tp, **fixed, **settings}
    )


def rows_of(mesh, folder, contestants, **settings):
    """Rows and failures of contestants, given by recipe, payload and what transposes are made of."""
    ranks = Ranks(mesh.get_rank(), mesh.size(), dist.FileStore(f"{folder}/store", mesh.size()), patience=60, grace=5)
    with mock.patch.object(experts, "contestants", return_value=[Contestant(*each) for each in contestants]):
        path = Path(folder) / "rows.json"
        return experts.measure_layers(settings_of(mesh.size(), **settings), ranks, torch.device("cpu"), path)


def model_of(mesh, contestant):
    model = settings_of(mesh.size()).maker(torch.device("cpu"))()
    experts.split(model, Contestant(*contestant), mesh.size())
    return model


def split_modules(mesh, contestant):
    """The names of plain linear layers, of converted layers, and of modules of FSDP; local sizes of experts."""
    model = model_of(mesh, contestant)
    kinds = [
        {name for name, module in model.named_modules() if type(module) is kind} for kind in (nn.Linear, Float8Linear)
    ]
    sharded = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
    return [*kinds, sharded], {n: tuple(p.to_local().shape) for n, p in model.named_parameters() if ".experts." in n}


def clipped(mesh, limit):
    """The largest difference of clipped gradients from gradients that a float64 norm scales, over the largest element.

    Experts have gradients on a mesh of their own.
    """
    model = model_of(mesh, ("bf16", "high_precision"))
    torch.manual_seed(mesh.get_rank())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    # Parameters that are no experts are no DTensors here: each rank has them whole, and its own gradients.
    parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    squares = torch.stack([part.double().square().sum() for part in parts])
    mine = torch.tensor([isinstance(p.grad, DTensor) for p in model.parameters()])
    of_experts = squares[mine].sum()
    dist.all_reduce(of_experts)
    norm = (of_experts + squares[~mine].sum()).sqrt()
    expected = [part * min(1.0, limit / norm.item()) for part in parts]
    clip_gradients(model, limit)
    found = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, expected, strict=True))
