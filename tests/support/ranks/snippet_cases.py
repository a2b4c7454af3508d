"""Given names and checks of the snippets of README and docs."""

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import rollout_models
import snippet_checks as checks
import torch
import vision_checks
from fsdp_models import VOCABULARY, Stage, loss_of
from snippet_checks import HIDDEN, Mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

import tritonfp8


@dataclass(frozen=True)
class Case:
    """``given(mesh)`` returns the names that a snippet uses but does not define; ``check(names)`` runs after it."""

    given: Callable[[Any], dict[str, Any]]
    check: Callable[[dict[str, Any]], None]
    ranks: bool = True


def run(mesh, name, source):
    """Run a snippet and its check in one namespace."""
    torch.manual_seed(0)
    case = CASES[name]
    names = case.given(mesh)
    exec(compile(source, name, "exec"), names)
    case.check(names)


def recipes_of(model):
    return {m.recipe.name for m in model.modules() if isinstance(m, tritonfp8.Float8Linear)}


def converted(model):
    tritonfp8.convert(model, "rowwise")
    return model


# Snippets for one process.


def check_reverted(names):
    assert list(names["report"].converted) == ["gate", "up", "down"]
    assert recipes_of(names["model"]) == set()


def check_head(names):
    assert recipes_of(names["model"]["lm_head"]) == {"rowwise_hp_grad_weight"}
    assert recipes_of(names["model"]["mlp"]) == {"rowwise"}


def in_an_empty_folder(mesh):
    before = os.getcwd()
    os.chdir(tempfile.mkdtemp())
    return {"tritonfp8": tritonfp8, "model": Mlp(), "before": before}


def empty(mesh):
    names = in_an_empty_folder(mesh)
    return {name: names[name] for name in ("tritonfp8", "before")}


def check_file(names):
    os.chdir(names["before"])
    assert recipes_of(names["model"]) == {"rowwise_fast"}


def exported(mesh):
    models = (nn.Sequential(nn.Linear(128, 256), nn.SiLU(), nn.Linear(256, 128)) for _ in range(3))
    names = dict(zip(("model", "other_model", "copy"), models, strict=True)) | {"weights": (weights := {})}
    return in_an_empty_folder(mesh) | names | {"engine": SimpleNamespace(update=weights.__setitem__)}


def check_exported(names):
    os.chdir(names["before"])
    assert {"0.weight", "0.weight_scale_inv", "2.bias"} <= names["weights"].keys()
    assert all((names[x][0].weight - names["model"][0].weight).abs().max() < 0.01 for x in ("other_model", "copy"))


def accumulation(mesh):
    model = converted(Mlp())
    before = [p.detach().clone() for p in model.parameters()]
    return {
        "tritonfp8": tritonfp8,
        "model": model,
        "loss": lambda out: out.square().mean(),
        "micro_batches": [torch.randn(3, HIDDEN) for _ in range(2)],
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "before": before,
    }


def check_all_moved(names):
    pairs = zip(names["model"].parameters(), names["before"], strict=True)
    assert not any(torch.equal(now, before) for now, before in pairs)


def check_product(names):
    expected = names["x"] @ names["weight"].t()
    assert names["out"].dtype == torch.bfloat16
    assert (names["out"].float() - expected).square().mean() < 1e-2 * expected.square().mean()


def verified(mesh):
    model = converted(Mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {"tritonfp8": tritonfp8, "model": model, "x": torch.randn(3, HIDDEN), "optimizer": optimizer}


def watched(mesh):
    names = {**accumulation(mesh), **in_an_empty_folder(mesh)}
    return {**names, "model": converted(names["model"]), "batches": [torch.randn(3, HIDDEN) for _ in range(2)]}


def check_watched(names):
    files = os.listdir()
    os.chdir(names["before"])
    assert sorted(files) == ["health.csv", "health.png"]
    assert len(names["stats"].samples) == 9


def check_mapping(names):
    assert set(names["found"].errors) == set(tritonfp8.recipes.load("recipes.toml")) == {"gate", "up", "down"}
    os.chdir(names["before"])
    assert recipes_of(names["model"]) == {"tensorwise"}


def tiny_llama(mesh):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": HIDDEN, "intermediate_size": 128}
    config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    return {"torch": torch, "tritonfp8": tritonfp8, "model": LlamaForCausalLM(config)}


def check_trains(names):
    """Every parameter changes, with and without autocast around the step, and layers read gathered weights."""
    model, optimizer = names["model"], names["optimizer"]
    linears = [m for m in model.modules() if isinstance(m, tritonfp8.Float8Linear)]
    gathered = []
    for linear in linears:
        linear.register_forward_pre_hook(lambda module, args: gathered.append(type(module.weight).__name__))
    before = [p.full_tensor() for p in model.parameters()]
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(torch.arange(12).view(2, 6))
        out = getattr(out, "logits", out)
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert gathered == ["GatheredWeight"] * 2 * len(linears)
    assert not any(torch.equal(p.full_tensor(), old) for p, old in zip(model.parameters(), before, strict=True))


def fsdp(mesh):
    model = nn.Module()
    model.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
    model.embed = nn.Embedding(64, HIDDEN)
    model.forward = lambda tokens: model.layers[1](model.layers[0](model.embed(tokens)))
    return {"model": model, "mesh": mesh}


def named_mesh(name):
    return init_device_mesh("cpu", (2,), mesh_dim_names=(name,))


def parallel(mesh):
    block = nn.ModuleDict({"up": nn.Linear(HIDDEN, 128), "down": nn.Linear(128, HIDDEN)})
    return {"block": block, "mesh": named_mesh("tp")}


def check_parallel(names):
    block = names["block"]
    out = block["down"](block["up"](torch.ones(3, HIDDEN)))
    out.sum().backward()
    assert out.shape == (3, HIDDEN)
    assert block["up"].weight.to_local().shape == (64, HIDDEN)


def sequence_parallel(mesh):
    return {"block": converted(Mlp()), "mesh": named_mesh("tp")}


def check_sequence_parallel(names):
    out = names["block"](torch.ones(1, 5, HIDDEN))
    out.sum().backward()
    assert out.shape == (1, 5, HIDDEN)


def tokens_of_their_own(mesh):
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import parallelize_module

    from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

    plan = {
        "": PrepareFloat8ModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **dict.fromkeys(("gate", "up"), Float8ColwiseParallel()),
        "down": Float8RowwiseParallel(output_layouts=Shard(1)),
    }
    block = parallelize_module(converted(Mlp()), named_mesh("tp"), plan)
    return {"block": block, "my_tokens": torch.ones(1, (127, 129)[mesh.get_local_rank()], HIDDEN)}


def check_tokens(names):
    assert names["out"].shape == names["my_tokens"].shape


def pipeline(mesh):
    index = mesh.get_local_rank()
    tokens = torch.randint(VOCABULARY, (8, 7))
    return {
        "stage_module": Stage(index, 2),
        "index": index,
        "count": 2,
        "device": torch.device("cpu"),
        "loss": loss_of,
        "batch": tokens,
        "target": tokens,
    }


def check_pipeline(names):
    assert all(p.grad.abs().max() > 0 for p in names["stage_module"].parameters())


def context(mesh):
    return {"block": converted(nn.ModuleDict({"q": nn.Linear(HIDDEN, HIDDEN)})), "mesh": named_mesh("cp")}


def check_context(names):
    out = names["block"]["q"](torch.ones(1, 5, HIDDEN))
    assert out.shape == (1, 5, HIDDEN)


def trainer(mesh):
    from transformers import Trainer, TrainingArguments

    names = tiny_llama(mesh)
    rows = torch.randint(64, (8, 6))
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no"
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    before = [p.detach().clone() for p in names["model"].parameters()]
    return {**names, "Trainer": Trainer, "args": args, "data": data, "before": before}


def check_trainer(names):
    check_all_moved(names)
    assert recipes_of(names["model"]) == {"rowwise"}


def accelerated(mesh):
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin
    from trainer_cases import act_as_launched

    act_as_launched()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    names = tiny_llama(mesh)
    optimizer = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    return {**names, "optimizer": optimizer, "accelerator": Accelerator(cpu=True, fsdp_plugin=plugin)}


def with_lora(mesh):
    import peft

    tokens = torch.randint(64, (2, 6))
    return {**tiny_llama(mesh), "peft": peft, "batch": {"input_ids": tokens, "labels": tokens}}


def check_lora(names):
    assert len(names["report"].converted) == 2 * 7
    assert not [name for name in names["report"].converted if "lora" in name]


def lightning_trainer(mesh):
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Mlp()

        def training_step(self, batch, index):
            return self.model(batch).float().square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    before = [p.detach().clone() for p in module.parameters()]
    options = {"accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    data = torch.utils.data.DataLoader(torch.randn(4, HIDDEN), batch_size=2)
    names = {"lightning": lightning, "module": module, "model": module, "before": before}
    return {**names, "options": {**options, "enable_progress_bar": False}, "data": data}


def fabric(mesh):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy
    from lightning_cases import launched, shard

    launched()
    names = {"Fabric": Fabric, "ModelParallelStrategy": ModelParallelStrategy, "shard": shard, "model": Mlp()}
    return {**names, "options": {"accelerator": "cpu", "devices": 2}}


def check_fabric(names):
    assert len(names["plugin"].gathered.converted) == 3
    assert names["model"](torch.ones(2, HIDDEN)).shape == (2, HIDDEN)


def check_fsdp(names):
    assert isinstance(names["model"], FSDPModule)
    check_trains(names)


def advised(mesh):
    return {"model": Mlp().bfloat16(), "x": torch.randn(64, HIDDEN, dtype=torch.bfloat16)}


def check_advised(names):
    assert not names["advice"].measured
    assert {step.contender for step in names["advice"].steps} >= {"bf16", "rowwise", "blockwise"}
    # Layers this small stay in bf16.
    assert recipes_of(names["model"]) == set()


CASES = {
    "README.md-0": Case(lambda mesh: {}, checks.check_program, ranks=False),
    "README.md-1": Case(lambda mesh: {"tritonfp8": tritonfp8, "model": Mlp()}, check_reverted, ranks=False),
    "tensors.md-0": Case(
        lambda mesh: {"x": torch.randn(5, 200), "weight": torch.randn(7, 200)}, check_product, ranks=False
    ),
    "advise.md-0": Case(advised, check_advised, ranks=False),
    "convert.md-0": Case(lambda mesh: {"model": checks.with_lm_head()}, check_head, ranks=False),
    "convert.md-1": Case(in_an_empty_folder, check_file, ranks=False),
    "convert.md-2": Case(lambda mesh: {"model": Mlp()}, checks.check_recipe("rowwise_codes"), ranks=False),
    "convert.md-3": Case(lambda mesh: {"model": Mlp()}, checks.check_recipe("rowwise_dequantized"), ranks=False),
    "convert.md-4": Case(accumulation, check_all_moved, ranks=False),
    "convert.md-5": Case(lambda mesh: {"tritonfp8": tritonfp8, "model": Mlp()}, checks.check_stored, ranks=False),
    "convert.md-6": Case(lambda mesh: {"model": Mlp()}, checks.check_trained_in_8_bits, ranks=False),
    "convert.md-7": Case(checks.with_optimizer, checks.check_steps_in_backward, ranks=False),
    "convert.md-8": Case(checks.trained_in_8_bits, checks.check_averaged, ranks=False),
    "convert.md-9": Case(checks.even_layer, checks.check_packed, ranks=False),
    "experts.md-0": Case(checks.mixture, checks.check_mixture, ranks=False),
    "experts.md-1": Case(checks.groups, checks.check_groups, ranks=False),
    "experts.md-2": Case(checks.stored_mixture, checks.check_stored_mixture, ranks=False),
    "experts.md-3": Case(checks.sharded_mixture, checks.check_sharded_mixture),
    "export.md-0": Case(exported, check_exported, ranks=False),
    "export.md-1": Case(lambda mesh: checks.saved(trainer(mesh) | empty(mesh)), checks.check_written, ranks=False),
    "export.md-2": Case(checks.generating, checks.check_generating, ranks=False),
    "rollout.md-0": Case(checks.an_engine, checks.check_engine, ranks=False),
    "rollout.md-1": Case(checks.an_engine, checks.check_engine),
    "health.md-0": Case(watched, check_watched, ranks=False),
    "health.md-1": Case(lambda mesh: in_an_empty_folder(mesh) | {"x": torch.randn(64, HIDDEN)}, check_mapping, False),
    "reinforcement.md-0": Case(rollout_models.given, rollout_models.check_trained, ranks=False),
    "reinforcement.md-1": Case(rollout_models.exact_given, rollout_models.check_exact, ranks=False),
    "transformers.md-0": Case(trainer, check_trainer, ranks=False),
    "transformers.md-1": Case(lambda mesh: checks.saved(empty(mesh) | with_lora(mesh)), checks.check_saved, False),
    "transformers.md-2": Case(lambda mesh: checks.saved(empty(mesh) | with_lora(mesh)), checks.check_auto, False),
    "transformers.md-3": Case(tiny_llama, checks.check_causal, ranks=False),
    "transformers.md-4": Case(accelerated, check_fsdp),
    "verify.md-0": Case(verified, checks.check_verified, ranks=False),
    "verify.md-1": Case(verified, checks.check_step, ranks=False),
    "lightning.md-0": Case(lightning_trainer, check_trainer, ranks=False),
    "lightning.md-1": Case(fabric, check_fabric),
    "peft.md-0": Case(with_lora, check_lora, ranks=False),
    "vision.md-0": Case(vision_checks.pipeline, vision_checks.check_pipeline, ranks=False),
    "vision.md-1": Case(vision_checks.on_meta, vision_checks.check_auto, ranks=False),
    "vision.md-2": Case(vision_checks.averaged, vision_checks.check_average, ranks=False),
    "vision.md-3": Case(vision_checks.plain, vision_checks.check_adapters, ranks=False),
    "torchtitan.md-0": Case(lambda mesh: {}, checks.check_torchtitan, ranks=False),
    "distributed.md-0": Case(parallel, check_parallel),
    "distributed.md-1": Case(sequence_parallel, check_sequence_parallel),
    "distributed.md-2": Case(tokens_of_their_own, check_tokens),
    "distributed.md-3": Case(fsdp, check_fsdp),
    "distributed.md-4": Case(pipeline, check_pipeline),
    "distributed.md-5": Case(context, check_context),
    "distributed.md-6": Case(checks.units_of_ranks, checks.check_all_ranks_alike),
}
