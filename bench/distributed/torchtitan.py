"""torchtitan's Qwen3 with tensor parallelism over two processes against one process, with the same weights and text:
``python -m bench.distributed.torchtitan --out bench/results/nvidia-h200/torchtitan-x2``

torchtitan's own functions shard the models; ``Float8Converter`` converts them, and the output head too. A run is valid
only if every parameter changed. The losses of all steps must then be within 1e-3 of one process's losses. bf16 shows
how much of the difference is the order of sums. With FSDP2 over both processes, losses with and without the 8-bit
gather must be equal to the bit. On CPUs the processes use gloo, and the reference implementation computes.

With ``--experts`` the experts of a mixture are in FP8 too. Two processes that each hold half of the experts, with FSDP2
or tensor parallelism of the other layers, are then compared with two and one that hold all.

The rows ``noise`` are a control: one process, whose first weights differ by 1e-7 of their values. Sums in another
order differ as little. Losses that such noise moves beyond 1e-3 say nothing about tensor parallelism.

With ``--model 8b`` (or ``70b``, ``30b-a3b``) torchtitan's own Trainer trains the whole model, or so many of its layers,
for its tokens a second, MFU, memory, bytes of collectives and losses, by contender and layout; ``tp+ep4`` has both.
With ``--losses`` the runs are deterministic, and losses with and without the 8-bit gather (``fsdp,wide``) must be equal
to the bit, as must the first losses where rows travel to experts in 8 bits and in high precision (``ep4,ep4+exact``).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import sys
import types
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from bench.contest.machine import results_folder, write_results
from bench.distributed.compare import make_deterministic
from bench.distributed.run import QUANTIZED
from bench.distributed.titan.config import LAYOUTS, MODELS, Whole, use_torch_attention, wholes_of
from bench.distributed.titan.trainer import launch, run_whole
from bench.distributed.titan.trainer import serve as serve_whole
from bench.models import with_head

# By which losses of two processes may differ from losses of one, losses of the two gathers, and the control's losses.
# With experts in FP8 the limit is above what the control shows: a code that rounds the other way sends tokens to other
# experts.
LIMITS = {"tp": 1e-3, "tp x fsdp": 1e-3, "gather": 0.0, "ep": 2e-2, "tp x ep": 2e-2, "noise": math.inf}
NOISE = 1e-7
RATE = 1e-3
PLAIN = "bf16"


@dataclass(frozen=True)
class Program:
    """One training run.

    Attributes:
        recipe: a recipe, or ``"bf16"`` for torchtitan without this package.
        flavor: one of torchtitan's debug models.
        processes: their number.
        tp: degree of tensor parallelism; FSDP2 takes the other processes.
        ep: degree of expert parallelism, of the processes of both.
        experts: whether experts are converted.
        gather: whether FSDP2 gathers weights in 8 bits.
        dtype: of activations and gathered weights, ``mixed_precision_param`` of torchtitan.
        noise: by how much the first weights differ from other programs' weights, as a share of their values.
        layers: of the model's layers so many; 0 for all.
        batch, length: sequences of a data-parallel rank, and their tokens.
        steps: optimizer steps.
    """

    recipe: str
    flavor: str = "debugmodel"
    processes: int = 1
    tp: int = 1
    ep: int = 1
    experts: bool = False
    gather: bool = True
    dtype: str = "bfloat16"
    noise: float = 0.0
    layers: int = 0
    batch: int = 4
    length: int = 256
    steps: int = 10


def _supply_missing(device: str) -> None:
    """torchtitan 0.3 uses names that torch 2.11 lacks, in modes not used here, and takes CUDA without a GPU."""
    import torch.distributed.fsdp

    if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
        torch.distributed.fsdp.DataParallelMeshDims = type("DataParallelMeshDims", (), {})  # type: ignore[misc]
    if not hasattr(dist, "set_timeout"):
        # It shortens the time after which a rank that waits gives up.
        dist.set_timeout = lambda *_, **__: None  # type: ignore[attr-defined]
    if device == "cpu":
        torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]


def _config(program: Program) -> Any:
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.models.qwen3 import model_registry
    from torchtitan.trainer import Trainer

    from tritonfp8.integrations.torchtitan import Float8Converter

    dense = None if program.experts else lambda module, name: isinstance(module, nn.Linear) and "router" not in name
    convert = Float8Converter.Config(recipe=with_head(program.recipe), filter=dense, all_gather=program.gather)
    spec = model_registry(program.flavor, converters=[] if program.recipe == PLAIN else [convert])
    use_torch_attention(spec)
    spec.model.layers = spec.model.layers[: program.layers or None]
    return Trainer.Config(
        model_spec=spec,
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor", tensor_parallel_degree=program.tp, expert_parallel_degree=program.ep
        ),
        training=TrainingConfig(
            local_batch_size=program.batch,
            seq_len=program.length,
            mixed_precision_param=program.dtype,
            mixed_precision_reduce="float32",
            disable_cuda_graphs=True,
        ),
    )


def _experts_in_float32(self: Any, x: Tensor, tokens: Tensor) -> Tensor:
    """The forward of torchtitan's experts, whose GEMMs are in bf16 for any dtype of activations.

    With tensor parallelism over the hidden dim, the part of a sum that a rank computes would then be rounded to bf16.
    FP8 layers would quantize other values from the first step on, and the comparison would show torchtitan's rounding.
    """
    weights = (self.w1_EFD, self.w2_EDF, self.w3_EFD)
    local = (weight.to_local() if isinstance(weight, DTensor) else weight for weight in weights)
    counts = tokens.tolist()
    groups = x.split([*counts, x.shape[0] - sum(counts)])
    parts = [
        (F.silu(rows @ gate.t()) * (rows @ up.t())) @ down.t()
        for rows, gate, down, up in zip(groups[:-1], *local, strict=True)
    ]
    return torch.cat([*parts, torch.zeros_like(groups[-1])])


def _build(program: Program, device: str) -> tuple[Any, nn.Module, Any]:
    """The config, the model as torchtitan's Trainer shards it, and the parallel dims."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.common.moe import GroupedExperts

    config = _config(program)
    spec = config.model_spec
    set_spmd_backend(config.parallelism.spmd_backend)
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
    if device == "cpu":
        # Gloo adds gradients, and cannot scale them in the same call.
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
    if program.dtype == "float32" and not program.experts:
        for module in model.modules():
            if isinstance(module, GroupedExperts):
                module.forward = types.MethodType(_experts_in_float32, module)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
        for name, parameter in model.named_parameters():
            parameter.copy_(_initial(name, parameter, program.noise))
    return config, model.train(), dims


def _initial(name: str, parameter: Tensor, noise: float) -> Tensor:
    """Values that depend on the name only, so that a parameter has them however it is sharded."""
    name = name.replace("_checkpoint_wrapped_module.", "")
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.ones(parameter.shape)
    if parameter.dim() > 1:
        whole.normal_(std=0.02, generator=generator)
    if noise:
        whole *= 1 + noise * torch.randn(whole.shape, generator=generator)
    whole = whole.to(parameter.device)
    if isinstance(parameter, DTensor):
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    return whole


def _whole(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    return value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()


def train(program: Program, device: str) -> dict[str, Any]:
    """Train.

    Returns:
        ``losses``, means over the tokens of all ranks, in nats a token; ``stuck``, names of parameters that did not
        change; ``converted``, the number of layers and of modules of experts.
    """
    from torchtitan.components.loss import CrossEntropyLoss

    from tritonfp8 import Float8Linear
    from tritonfp8.layers.moe import is_converted_experts
    from tritonfp8.training import corpus

    config, model, dims = _build(program, device)
    before = {name: _whole(parameter) for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    vocabulary = config.model_spec.model.vocab_size
    loss_fn = CrossEntropyLoss.Config(global_vocab_size=vocabulary).build(compile_config=config.compile)
    replicas = program.processes // program.tp
    place = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    text, losses = corpus.load().data.long(), []
    batch, length = program.batch, program.length
    for step in range(program.steps):
        begin = (step * replicas + place) * batch * (length + 1)
        rows = text[begin : begin + batch * (length + 1)].view(batch, length + 1).to(device)
        tokens = torch.tensor(batch * length * replicas, device=device)
        loss, _ = loss_fn(model(rows[:, :-1]), rows[:, 1:], tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total.item() / program.tp)
    stuck = [name for name, p in model.named_parameters() if torch.equal(_whole(p), before[name])]
    converted = sum(isinstance(module, Float8Linear) or is_converted_experts(module) for module in model.modules())
    return {"losses": losses, "stuck": stuck, "converted": converted}


def serve(programs: list[Program], path: Path, device: str) -> None:
    """Train ``programs`` in this rank; rank 0 writes their results."""
    make_deterministic()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    found = []
    for program in programs:
        found.append(train(program, device))
        if dist.get_rank() == 0:
            print(program, found[-1]["losses"][-1], file=sys.stderr, flush=True)
            path.write_text(json.dumps(found))
    dist.destroy_process_group()


def run(programs: list[Program], device: str) -> dict[Program, dict[str, Any]]:
    """Train each program by the processes that it names.

    Raises:
        RuntimeError: the processes failed; their output says why.
    """
    results: dict[Program, dict[str, Any]] = {}
    for processes in sorted({program.processes for program in programs}):
        chosen = [program for program in programs if program.processes == processes]
        results |= dict(zip(chosen, launch("programs", chosen, processes, device), strict=True))
    return results


def judge(first: dict[str, Any], second: dict[str, Any], limit: float) -> dict[str, Any]:
    """Whether all parameters changed in both runs, and no loss differs by more than ``limit``."""
    differences = [abs(a - b) for a, b in zip(first["losses"], second["losses"], strict=True)]
    stuck = sorted({*first["stuck"], *second["stuck"]})
    return {
        "difference": max(differences),
        "stuck": stuck,
        # A comparison with NaN is false, and max() may miss a NaN.
        "ok": not stuck and all(each <= limit for each in differences) and first["converted"] == second["converted"],
        "converted": first["converted"],
        "losses": [first["losses"], second["losses"]],
    }


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def shards_experts() -> bool:
    """Whether FSDP2 shards experts over another mesh than other layers, which torchtitan asks of it in each EP."""
    from torch.distributed.fsdp._fully_shard import _fsdp_common

    return hasattr(_fsdp_common, "ShardPlacementResult")


def pairs_of(
    recipes: list[str], flavors: list[str], dtypes: list[str], experts: bool = False, ranks: int = 2, **sizes: int
) -> list[tuple[str, Program, Program]]:
    """Pairs of programs and what they compare, a key of :data:`LIMITS`.

    Args:
        recipes, flavors, dtypes: of the programs.
        experts: whether experts are converted, and over ranks.
        ranks: processes. Over more than two, tensor parallelism is over all and over two, and experts are over four.
        sizes: ``layers``, ``batch``, ``length`` and ``steps`` of the programs.
    """
    pairs = []
    ep = min(ranks, 4)
    for flavor, dtype, recipe in itertools.product(flavors, dtypes, [PLAIN, *recipes]):
        named: dict[str, Any] = {"recipe": recipe, "flavor": flavor, "dtype": dtype, "experts": experts, **sizes}
        make = functools.partial(Program, **named)
        if experts and shards_experts():
            pairs.append(("ep", make(processes=ranks, ep=ep), make(processes=ranks)))
            pairs.append(("tp x ep", make(processes=ranks, tp=2, ep=ep), make(processes=ranks // 2)))
        elif not experts:
            pairs.append(("tp", make(processes=ranks, tp=ranks), make()))
            if ranks > 2:
                pairs.append(("tp x fsdp", make(processes=ranks, tp=2), make(processes=ranks // 2)))
        pairs.append(("noise", make(noise=NOISE), make()))
        if recipe != PLAIN:
            mixed = {"tp": 2, "ep": ep if experts and shards_experts() else 1}
            for layout in ({}, mixed)[: 1 + (ranks > 2)]:
                on, off = (make(processes=ranks, gather=gather, **layout) for gather in (True, False))
                pairs.append(("gather", on, off))
    return pairs


@app.command(help=__doc__)
def main(
    names: Annotated[str, typer.Option("--recipes", help="Comma-separated.")] = QUANTIZED,
    flavors: Annotated[str, typer.Option(help="torchtitan's debug models, comma-separated.")] = "debugmodel",
    dtypes: Annotated[str, typer.Option(help="dtypes of activations, comma-separated.")] = "float32,bfloat16",
    experts: Annotated[bool, typer.Option(help="Convert experts, and compare expert parallelism.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. [default: cuda if available]")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for torchtitan.json.")] = None,
    model: Annotated[str, typer.Option(help=f"A whole model: {', '.join(MODELS)}.")] = "",
    contenders: Annotated[str, typer.Option(help="Of whole models.")] = "bf16,torchao rowwise,rowwise",
    layouts: Annotated[str, typer.Option(help=f"Of whole models: {', '.join(LAYOUTS)}, also joined by +.")] = "fsdp",
    layers: Annotated[int, typer.Option(help="Of the model; 0 for all.")] = 0,
    steps: Annotated[int | None, typer.Option(help="[default: 10; of whole models 30]")] = None,
    processes: Annotated[int, typer.Option(help="Ranks, a GPU each.", min=1)] = 2,
    losses: Annotated[bool, typer.Option("--losses", help="Compare losses of whole models, not speeds.")] = False,
    sizes: Annotated[tuple[int, int], typer.Option(help="Sequences of a rank, and tokens; 0 for the default.")] = (
        0,
        0,
    ),
    warm: Annotated[int, typer.Option(help="Compile so many whole models at a time before.")] = 0,
    requested: Annotated[str | None, typer.Option("--serve", hidden=True)] = None,
) -> None:
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if requested is not None:
        _supply_missing(device)
        kind, requests = json.loads(requested)
        served, made = {"programs": (serve, Program), "whole": (serve_whole, Whole)}[kind]
        served([made(**each) for each in requests], out or Path("found.json"), device)
        return
    given = {"layers": layers, "steps": steps, "batch": sizes[0], "length": sizes[1]}
    chosen = {name: size for name, size in given.items() if size}
    if model:
        whole = {"processes": processes, "compiled": device == "cuda", "deterministic": losses, **chosen}
        wholes = wholes_of(model, layouts.split(","), contenders.split(","), whole)
        ranks = "" if processes == 2 else f"-x{processes}"
        name = (
            f"torchtitan-{model}{ranks}-{layouts.replace(',', '-').replace('+', '-')}{'-losses' if losses else ''}.json"
        )
        sys.exit(not run_whole(wholes, device, warm, (out or results_folder()) / name))
    pairs = pairs_of(names.split(","), flavors.split(","), dtypes.split(","), experts, processes, **chosen)
    if experts and not shards_experts():
        print(
            f"torch {torch.__version__} cannot shard experts as torchtitan does: expert parallelism is left out",
            flush=True,
        )
    found = run(list(dict.fromkeys(program for _, *pair in pairs for program in pair)), device)
    rows = []
    for way, first, other in pairs:
        verdict = judge(found[first], found[other], LIMITS[way])
        shown = {name: getattr(first, name) for name in ("recipe", "flavor", "dtype", "processes", "tp", "ep")}
        rows.append({"compared": way, **shown, **verdict})
        named = f"{way:<10}{first.tp:<3}{first.flavor:<16}{first.dtype:<10}{first.recipe:<24}"
        end = f"{verdict['converted']:>3} layers {verdict['difference']:.2e}"
        print("ok " if verdict["ok"] else "BAD", named, end, flush=True)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        limits = {way: LIMITS[way] for way in {row["compared"] for row in rows} - {"noise"}}
        write_results(out / "torchtitan.json", {"limits": limits, "steps": steps or Program.steps, "rows": rows})
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    app()
