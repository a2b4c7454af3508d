"""Functions of each rank in the tests of the 8-bit all-gather of experts. Each returns plain data."""

import contextlib
import copy
import warnings
from dataclasses import dataclass

import mixtures
import torch
from raised import raised
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather

HIDDEN, INSIDE, TOP_K = 64, 48, 2


@dataclass(frozen=True)
class Setup:
    """How the model is sharded and run."""

    recipe: str = "rowwise"
    experts: int = 8
    reshard: bool | int = True
    recompute: bool = False
    compiled: bool = False
    micro_batches: int = 1
    param_dtype: torch.dtype | None = torch.bfloat16
    autocast: bool = False
    family: str | None = None
    shard_dim: int | None = None


class Block(nn.Module):
    """A linear layer, and experts with a router."""

    def __init__(self, setup):
        super().__init__()
        self.first, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, setup.experts)
        self.experts = tritonfp8.Float8Experts(setup.experts, HIDDEN, INSIDE, recipe=setup.recipe)

    def forward(self, x):
        h = torch.relu(self.first(x))
        weights, index = self.router(h).float().softmax(1).topk(TOP_K)
        return x + self.experts(h, index, weights.to(h.dtype))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, setup):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block(setup) for _ in range(2)), nn.Linear(HIDDEN, 16)
        self.recompute = setup.recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.last(x)


def build(mesh, setup, enabled, cast="param_dtype"):
    """The sharded model: of this file, or a mixture of transformers."""
    torch.manual_seed(0)
    if setup.family is None:
        model = Model(setup)
        blocks = model.blocks
        if setup.recipe != "bf16":
            tritonfp8.convert(model, setup.recipe, ["*.first"])
    else:
        model = mixtures.model_of(setup.family)
        blocks = model.model.layers
        tritonfp8.convert(model, setup.recipe)
    model.to(mesh.device_type)
    report = enable_float8_all_gather(model, cast) if enabled else None
    if setup.compiled:
        backend = "aot_eager" if mesh.device_type == "cpu" else "inductor"
        for block in blocks:
            block.compile(backend=backend, fullgraph=True)
    options = {"mesh": mesh, "reshard_after_forward": setup.reshard}
    if setup.shard_dim is not None:
        options["shard_placement_fn"] = lambda p: Shard(setup.shard_dim) if p.ndim == 3 else None
    if setup.param_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=setup.param_dtype)
    for module in (*blocks, model):
        fully_shard(module, **options)
    return model, report


def _loss(model, setup, mesh, step):
    generator = torch.Generator().manual_seed(100 * step + mesh.get_rank())
    if setup.family is not None:
        tokens = torch.randint(96, (2, 9), generator=generator).to(mesh.device_type)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    x, y = torch.randn(24, HIDDEN, generator=generator), torch.randint(16, (24,), generator=generator)
    return nn.functional.cross_entropy(model(x.to(mesh.device_type)).float(), y.to(mesh.device_type))


def train(mesh, setup, enabled, steps=2):
    """Losses and a digest of the weights; the parameters that are stuck; gathered bytes of the second step."""
    model, report = build(mesh, setup, enabled)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    losses, gathered = [], 0
    for step in range(steps):
        with count_collective_bytes() as traffic:
            for micro in range(setup.micro_batches):
                cast = torch.autocast(mesh.device_type, torch.bfloat16) if setup.autocast else contextlib.nullcontext()
                with cast:
                    loss = _loss(model, setup, mesh, 10 * step + micro)
                loss.backward()
                losses.append(loss.item())
        gathered = traffic.bytes["all_gather"]
        optimizer.step()
        optimizer.zero_grad()
    full = {name: p.full_tensor() for name, p in model.named_parameters()}
    assert all(isinstance(p, DTensor) for p in model.parameters())
    stuck = [name for name, p in full.items() if torch.equal(p, before[name])]
    digest = [p.double().abs().sum().item() for p in full.values()]
    names = [] if report is None else [name for name in report.converted if name.endswith("experts")]
    return losses, digest, stuck, gathered, names


def _actions(model, setup, mesh, enabled):
    """What may happen between two steps, by name."""

    def without_gradients(mode):
        with mode():
            _loss(model, setup, mesh, 99)

    return {
        "swap": lambda: tritonfp8.swap_recipe(model, "mxfp8"),
        "swap back": lambda: tritonfp8.swap_recipe(model, setup.recipe),
        "high precision": lambda: tritonfp8.swap_recipe(model, "bf16"),
        "revert": lambda: tritonfp8.revert(model),
        "no_grad": lambda: without_gradients(torch.no_grad),
        "inference": lambda: without_gradients(torch.inference_mode),
        "block alone": lambda: model.blocks[0](torch.ones(4, HIDDEN, device=mesh.device_type)).sum().backward(),
        "once": lambda: _once(model, setup, mesh, enabled),
        "copy": lambda: copy.deepcopy(model.state_dict()),
    }


def _once(model, setup, mesh, enabled):
    """Two passes after an evaluation that left weights gathered; if in 8 bits, with weights quantized once."""
    with torch.no_grad():
        _loss(model, setup, mesh, 98)
    with tritonfp8.quantize_weights_once(model) if enabled else contextlib.nullcontext():
        for _ in range(2):
            _loss(model, setup, mesh, 97).backward()


def after_actions(mesh, setup, enabled, actions):
    """Losses of a step before each action and of one after all, and whether every weight then changed."""
    model, _ = build(mesh, setup, enabled)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, stuck = [], []
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    for step, action in enumerate((*actions, None)):
        loss = _loss(model, setup, mesh, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        after = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
        stuck += [name for name, p in after.items() if torch.equal(p, before[name])]
        before = after
        if action is not None:
            _actions(model, setup, mesh, enabled)[action]()
            optimizer.zero_grad()
    return losses, stuck


def warned(mesh, setup):
    """The warnings of a step of a model whose experts cannot be gathered in 8 bits."""
    model, _ = build(mesh, setup, True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _loss(model, setup, mesh, 0).backward()
    return [str(each.message) for each in caught if "in 8 bits" in str(each.message)]


def master(mesh):
    """Losses where the float32 shards are quantized, and where they are rounded to bfloat16 first."""
    found = []
    for cast in ("master", "param_dtype"):
        setup = Setup()
        model, _ = build(mesh, setup, True, cast)
        found.append(_loss(model, setup, mesh, 0).item())
    return found


def errors(mesh):
    """The texts of errors."""
    setup = Setup()
    model, _ = build(mesh, setup, True)
    found = [raised(lambda: enable_float8_all_gather(model))]
    experts = tritonfp8.Float8Experts(4, HIDDEN, INSIDE, recipe="rowwise")
    enable_float8_all_gather(experts)
    found.append(raised(lambda: enable_float8_all_gather(experts)))
    _loss(model, setup, mesh, 0).backward()
    model.blocks[0].experts.down_proj.data = model.blocks[1].experts.down_proj.detach().clone()
    found.append(raised(lambda: _loss(model, setup, mesh, 0)))
    model, _ = build(mesh, setup, True)
    model.blocks[0].experts.register_forward_pre_hook(lambda module, args: module.down_proj.sum())
    found.append(raised(lambda: _loss(model, setup, mesh, 0)))
    return found
