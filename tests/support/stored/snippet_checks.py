"""Names and checks of the snippets of the documentation: stored weights, experts, engines, gradients, torchtitan."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from engines import bytes_of, engine_of, trainer_of, unfused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tritonfp8
from tritonfp8.distributed import OrderedGradients, clip_grad_norm_
from tritonfp8.layers.stored import StoredMatrices, StoredWeight, is_stored

HIDDEN = 64


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 128), nn.Linear(HIDDEN, 128)
        self.down = nn.Linear(128, HIDDEN)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


def check_stored(names):
    model = names["model"]
    assert [type(layer.weight) for layer in (model.gate, model.up, model.down)] == [StoredWeight] * 3
    assert not any(p.requires_grad for p in model.parameters())


def check_trained_in_8_bits(names):
    model, optimizer = names["model"], names["optimizer"]
    before = model.up.weight.dequantize()
    model(torch.randn(3, model.up.in_features)).square().mean().backward()
    optimizer.step()
    assert type(model.up.weight) is StoredWeight
    assert not torch.equal(model.up.weight.dequantize(), before)


def trained_in_8_bits(mesh):
    model = nn.Sequential(nn.Linear(64, 32))
    tritonfp8.convert(model, "rowwise", weight_storage="quantized")
    return {"model": model}


def with_lm_head():
    return nn.ModuleDict({"mlp": Mlp(), "lm_head": nn.Linear(HIDDEN, 64)})


def with_optimizer(mesh):
    found = trained_in_8_bits(mesh)
    return found | {"optimizer": tritonfp8.optim.AdamW(found["model"].parameters(), lr=1e-2)}


def check_steps_in_backward(names):
    model = names["model"]
    before = model[0].weight.dequantize()
    model(torch.randn(3, 64)).square().mean().backward()
    assert not torch.equal(model[0].weight.dequantize(), before)
    assert all(p.grad is None for p in model.parameters())


def check_averaged(names):
    model, average = names["model"], names["average"].module
    assert type(average[0].weight) is nn.Parameter
    assert type(model[0].weight) is StoredWeight
    # The first update of an average copies.
    assert torch.equal(average[0].weight, model[0].weight.dequantize())


class _Mixture(nn.Module):
    def __init__(self, recipe="bf16"):
        super().__init__()
        self.experts, self.out = tritonfp8.Float8Experts(4, 64, 48, recipe=recipe), nn.Linear(64, 64)

    def forward(self, x):
        index = torch.arange(len(x))[:, None] % 4
        return self.out(self.experts(x, index, torch.ones(len(x), 1)))


def mixture(mesh):
    return {"tritonfp8": tritonfp8, "model": _Mixture(), "batch": {"x": torch.randn(20, 64)}}


def check_mixture(names):
    assert list(names["report"].converted) == ["out"]
    assert list(names["report"].already) == ["experts"]


def stored_mixture(mesh):
    names = {"tritonfp8": tritonfp8, "model": _Mixture("rowwise"), "before": os.getcwd(), "source": _Mixture("rowwise")}
    os.chdir(tempfile.mkdtemp())
    tritonfp8.export.save(names["source"], "Qwen3-30B-A3B-FP8", "compressed_channel")
    return names


def check_stored_mixture(names):
    os.chdir(names["before"])
    weight, source = (names[model].experts.gate_up_proj for model in ("model", "source"))
    assert type(weight) is StoredMatrices
    assert (weight.dequantize() - source).abs().max() < 0.01
    assert names["report"].layers["experts.down_proj"].again == "codes kept"


def groups(mesh):
    offsets = torch.tensor([5, 5, 9], dtype=torch.int32)
    tensors = {"input": torch.randn(12, 64), "weight": torch.randn(3, 48, 64), "bias": None}
    return {"tritonfp8": tritonfp8, "offsets": offsets, **tensors}


def check_groups(names):
    expected = tritonfp8.functional.linear(names["input"][5:9], names["weight"][2])
    assert torch.equal(names["out"][5:9], expected)


def sharded_mixture(mesh):
    found = init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("ep",))
    return {**mixture(mesh), "mesh": found}


def check_sharded_mixture(names):
    experts = names["model"].experts
    assert isinstance(experts.down_proj, DTensor)
    assert experts.down_proj.to_local().shape[0] == 2
    assert names["model"](torch.randn(6, 64)).shape == (6, 64)


def check_program(names):
    assert [m.recipe.name for m in names["model"] if isinstance(m, tritonfp8.Float8Linear)] == ["rowwise"] * 2
    assert names["loss"].isfinite()
    assert all(names["optimizer"].state[p]["step"] == 4 for p in names["model"].parameters())


def check_recipe(name):
    """A check that all converted layers have the recipe of this name."""

    def check(names):
        layers = [layer for layer in names["model"].modules() if hasattr(layer, "recipe")]
        assert {layer.recipe.name for layer in layers} == {name}

    return check


def check_verified(names):
    assert list(names["report"].layers) == ["gate", "up", "down"]
    assert names["report"].fp8_share == 1
    check_step(names)


def check_step(names):
    assert all(p.grad is None for p in names["model"].parameters())


def check_torchtitan(names):
    config = names["qwen3_fp8"]()
    assert config.model_spec.model.float8.recipe == "rowwise"
    assert config.parallelism.spmd_backend == "partial_dtensor"


def generating(mesh):
    model, copy = (nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)) for _ in range(2))
    tritonfp8.convert(model, "rowwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(model, batch):
        model(batch).square().mean().backward()
        optimizer.step()

    return {
        "tritonfp8": tritonfp8,
        "before": model[0].weight.detach().clone(),
        "model": model,
        "copy": copy,
        "train": train,
        "batches": [torch.randn(4, 128) for _ in range(2)],
    }


def check_generating(names):
    assert not torch.equal(names["model"][0].weight, names["before"])
    x = torch.randn(3, 128)
    with torch.no_grad():
        assert torch.equal(names["copy"](x), names["model"](x))


def an_engine(mesh):
    tensors, steps = engine_of("llama", "fine_grained"), []

    def train(model, batch):
        model(batch).logits.float().square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.zero_grad()
        steps.append(batch)

    return {
        "model": trainer_of.__wrapped__("llama", "fine_grained"),
        "engine": SimpleNamespace(named_parameters=tensors.items),
        "train": train,
        "generate": lambda engine: None,
        "batches": [torch.arange(8).view(1, 8) + step for step in range(2)],
        "steps": steps,
    }


def check_engine(names):
    """An engine has the weights of a trainer after two steps; of another process the same ones are made here."""
    if "receiver" not in names:
        return
    model = names["model"]
    for batch in names["batches"][len(names["steps"]) :]:
        names["train"](model, batch)
    found = unfused([dict(names["engine"].named_parameters())], "llama", "fine_grained")
    for name, x in tritonfp8.export.tensors(model, "fine_grained"):
        assert torch.equal(bytes_of(found[name]), bytes_of(x)), name


def saved(names):
    names["model"].save_pretrained("checkpoint")
    return names


def check_saved(names):
    os.chdir(names["before"])
    trained = [name for name, parameter in names["model"].named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert any(is_stored(module) for module in names["base"].modules())


def check_auto(names):
    os.chdir(names["before"])
    assert names["model"].training
    assert any(is_stored(module) for module in names["model"].modules())


def check_causal(names):
    """A compiled model has the losses that it has with a mask."""
    model = names["model"]
    tokens = torch.randint(64, (2, 6))
    losses = {}
    for attention in ("causal", "sdpa"):
        model.set_attn_implementation(attention)
        torch.compiler.reset()
        losses[attention] = torch.compile(model, backend="eager")(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(losses["causal"], losses["sdpa"])


def check_written(names):
    assert sorted(os.listdir("out")) == sorted(os.listdir("checkpoint"))
    before, after = (Path(folder, "model.safetensors").read_bytes() for folder in ("checkpoint", "out"))
    assert len(before) == len(after)
    assert before != after
    os.chdir(names["before"])


def even_layer(mesh):
    """A layer whose codes fill whole bytes."""
    return {"torch": torch, "tritonfp8": tritonfp8, "model": torch.nn.Linear(64, 64), "x": torch.randn(8, 64)}


def check_packed(names):
    assert names["model"].weight.spec.format == "e2m1"


def units_of_ranks(mesh):
    """A sharded model and units of data, the same on each rank."""
    model = fully_shard(Mlp(), mesh=mesh)
    data = torch.randn(16, 4, HIDDEN, generator=torch.Generator().manual_seed(1))
    return {
        "model": model, "data": data, "loss": lambda out: out.square().mean(), "steps": 2, "ranks": mesh.size(),
        "rank": mesh.get_rank(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "before": [p.full_tensor().detach().clone() for p in model.parameters()],
    }  # fmt: skip


def check_all_ranks_alike(names):
    """The weights are the weights of one process."""
    model = Mlp()
    with torch.no_grad():
        for p, value in zip(model.parameters(), names["before"], strict=True):
            p.copy_(value)
    gradients, optimizer = OrderedGradients(model, 8), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in names["data"].split(8):
        for unit in step:
            (names["loss"](model(unit)) / 8).backward()
            gradients.add()
        gradients.finish()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for mine, other in zip(model.parameters(), names["model"].parameters(), strict=True):
        assert torch.equal(mine, other.full_tensor())
