"""Experts over ranks, forward and backward: time, peak memory and bytes of the all-to-alls, by what travels.

    torchrun --nproc-per-node 2 -m bench.distributed.experts --shape deepseek-v3
    torchrun --nproc-per-node 2 -m bench.distributed.experts --layers 8
    torchrun --nproc-per-node 8 -m bench.distributed.experts --layers 8 --ep 4 --tp 2 --steps 50

Each rank has its own tokens, as many as the shape says, and its part of the experts. ``--layers`` trains whole decoder
layers with embedding and head instead: FSDP2 shards what is no expert over the same ranks, AdamW updates float32
parameters, and each rank has ``--batch-size`` x ``--seq-len`` tokens of text; ranks that share attention (``--tp``)
share these. A loss that is not finite and a parameter that no step changed are failures.
"""

import functools
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import tritonfp8
from bench import tables
from bench.contest.machine import results_folder, write_results
from bench.distributed import compare, models
from bench.distributed.bars import mean_losses
from bench.distributed.ranks import AllFailedError, RankError, Ranks, joined
from bench.models import mixture, training_step
from bench.shapes import SHAPES, Shape
from tritonfp8 import recipes
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather, shard_experts
from tritonfp8.specs.checks import require
from tritonfp8.training import models as presets
from tritonfp8.training import timers

BASELINE = "bf16"
WARM_UP = 3
# Fields of a Qwen3MoeConfig.
LAYERS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-30b-a3b": {
        "vocab_size": 151936, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    },
    "tiny": {
        "vocab_size": 256, "hidden_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 48, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 160,
    },
}  # fmt: skip
KINDS = ("all_to_all", "all_gather", "reduce_scatter")


class Contestant(NamedTuple):
    """A recipe, in which transposes are made from ``transposed_from``, and the payload of its all-to-alls."""

    recipe: str
    payload: str = "float8"
    transposed_from: str = "values"

    @property
    def name(self) -> str:
        """Its name in the table."""
        if self.recipe == BASELINE:
            return BASELINE
        sent = "codes" if self.payload == "float8" else "high precision"
        return f"{self.recipe} from {self.transposed_from}, sends {sent}"


def contestants(names: tuple[str, ...]) -> list[Contestant]:
    """bf16; of each recipe rows that travel in high precision, as codes, and as codes that are read on arrival."""
    found = [Contestant(BASELINE, "high_precision")]
    for name in names:
        ways = (("high_precision", "values"), ("float8", "values"), ("float8", "codes"))
        found += [Contestant(name, *way) for way in ways]
    return found


def step_of(contestant: Contestant, shape: Shape, device: torch.device) -> Callable[[], Any]:
    """Forward and backward of a layer whose experts are sharded over all ranks."""
    layer = mixture(shape, device, tritonfp8.Float8Experts, BASELINE)
    if contestant.recipe != BASELINE:
        recipe = recipes.get(contestant.recipe, transposed_from=contestant.transposed_from)
        tritonfp8.swap_recipe(layer, recipe)
    mesh = torch.distributed.device_mesh.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    shard_experts(layer, mesh, contestant.payload)
    generator = torch.Generator(device).manual_seed(1 + torch.distributed.get_rank())
    tokens, hidden = shape.size[0], shape.size[3]
    x, grad = (torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    return training_step(layer, layer, x.requires_grad_(), grad)


@dataclass(frozen=True)
class LayerSettings(compare.Settings):
    """Settings of a comparison of whole decoder layers with experts over all ranks.

    Attributes:
        model: a name of :data:`LAYERS`.
        layers: number of decoder layers.
        ep: ranks that share the experts; 0 for all. FSDP2 shards them over the other ranks.
        gather: whether FSDP2 gathers weights of other contestants than bf16 in 8 bits.
    """

    layers: int = 1
    ep: int = 0
    gather: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = self.dp * self.tp
        if ranks % self.over or self.over % self.tp:
            raise ValueError(f"ep must divide the {ranks} ranks, and be a multiple of tp, {self.tp}; got {self.ep}")

    @property
    def over(self) -> int:
        """Number of ranks that share the experts."""
        return self.ep or self.dp * self.tp

    def contestants(self) -> list[models.Contestant]:
        """As :func:`contestants`, bf16 first."""
        found = []
        for each in contestants(self.recipes):
            own = each.recipe != BASELINE
            styles = models.FLOAT8_STYLES if own else models.TORCH_STYLES
            convert = functools.partial(split, contestant=each, ep=self.over, tp=self.tp, gather=self.gather and own)
            found.append(
                models.Contestant(each.name, convert, own=own, styles=styles if self.tp > 1 else None, experts=True)
            )
        return found

    def peak_lr(self) -> float:
        """``lr``, or the rate of other models, which have no preset. Raises ValueError for an unknown model."""
        require("model", self.model, tuple(LAYERS))
        return presets.CONFIG_FILE_LR if self.lr is None else self.lr

    def maker(self, device: torch.device) -> Callable[[], nn.Module]:
        """Make the model where it is used: initial weights of billions of parameters take a CPU minutes."""
        import transformers

        config = transformers.Qwen3MoeConfig(
            **LAYERS[self.model], num_hidden_layers=self.layers, norm_topk_prob=True, tie_word_embeddings=False,
            max_position_embeddings=max(self.seq_len, presets.MAX_SEQ_LEN),
        )  # fmt: skip

        def make() -> nn.Module:
            torch.manual_seed(self.seed)
            with torch.device(device):
                model: nn.Module = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.float32)
            return model

        return make


@functools.cache
def mesh_of_experts(device_type: str, ranks: int, ep: int) -> DeviceMesh:
    """A mesh with experts over ``ep`` ranks. It is made once, because each new mesh would add process groups."""
    return init_device_mesh(device_type, (ranks // ep, ep), mesh_dim_names=("dp", "ep"))


def split(model: nn.Module, contestant: Contestant, ep: int, tp: int = 1, gather: bool = False) -> None:
    """Convert the linear layers and experts, not routers and head, and give each rank its part of the experts.

    Ranks of tensor parallelism have one loss. FSDP2 over one rank communicates nothing. It casts the weights of experts
    to bf16 as it casts all others.
    """
    recipe: Any = contestant.recipe
    if recipe != BASELINE:
        recipe = recipes.get(recipe, transposed_from=contestant.transposed_from)
    tritonfp8.convert(model, recipe)
    mesh = mesh_of_experts(next(model.parameters()).device.type, torch.distributed.get_world_size(), ep)
    names = shard_experts(model, mesh["ep"], contestant.payload, average_gradients=ep // tp)
    if gather:
        enable_float8_all_gather(model)
    for name in names:
        fully_shard(model.get_submodule(name), mesh=mesh["dp"], mp_policy=models.POLICY, reshard_after_forward=True)


def seconds(step: Callable[[], Any], device: torch.device, steps: int) -> list[float]:
    """The time of each of ``steps`` steps, which begin on all ranks together, in seconds."""
    found = []
    for _ in range(steps):
        torch.distributed.barrier()
        timers.synchronize(device)
        began = time.perf_counter()
        step()
        timers.synchronize(device)
        found.append(time.perf_counter() - began)
    return found


def measure(contestant: Contestant, shape: Shape, device: torch.device, steps: int) -> dict[str, Any]:
    """The row of a contestant on this rank."""
    step = step_of(contestant, shape, device)
    seconds(step, device, WARM_UP)
    with count_collective_bytes() as traffic:
        step()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    before = timers.allocated(device)
    step()
    peak = timers.peak_bytes(device, before)
    row = {"contestant": contestant.name, "seconds": statistics.median(seconds(step, device, steps))}
    return row | {"peak_bytes": peak, "all_to_all_bytes": traffic.bytes["all_to_all"]}


def show(rows: list[dict[str, Any]], title: str) -> None:
    """Print the table."""
    table = Table(title=title)
    for column in ("contestant", "step", "over bf16", "peak memory", "all-to-all"):
        table.add_column(column)
    base = rows[0]
    for row in rows:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.3f} GiB"
        table.add_row(
            row["contestant"], f"{1e3 * row['seconds']:.3f} ms", f"{base['seconds'] / row['seconds']:.3f} x", peak,
            f"{row['all_to_all_bytes'] / base['all_to_all_bytes']:.3f} of bf16",
        )  # fmt: skip
    Console(width=120).print(table)


def failures(rows: list[compare.Row]) -> list[str]:
    """Why rows of whole layers are no results, one text each."""
    found = []
    for row in rows:
        if "reason" in row:
            found.append(f"{row['contender']}: {row['reason']}")
            continue
        if not all(math.isfinite(float(loss)) for losses in row["losses"] for loss in losses):
            found.append(f"{row['contender']}: losses that are not finite")
        if names := stuck(row["unchanged"]):
            found.append(f"{row['contender']}: no step changed {', '.join(names)}")
    return found


def stuck(unchanged: Sequence[list[str]]) -> list[str]:
    """Parameters that did not change on any rank, and parameters of experts that did not change on some rank.

    Text never has some tokens, so that a rank's rows of the embedding may get no gradient. Every rank has experts.
    """
    everywhere = set(unchanged[0]).intersection(*unchanged)
    return sorted(name for name in set().union(*unchanged) if name in everywhere or "experts." in name)


def show_layers(rows: list[compare.Row], title: str) -> None:
    """Print the table of whole layers."""
    table = Table(title=title)
    for column in ("contestant", "step", "over bf16", "tokens/s a rank", "peak memory", *KINDS, "first loss", "last"):
        table.add_column(column.replace("_", "-"))
    base = rows[0]["seconds"]
    for row in rows:
        losses, peak = mean_losses(row), row["peak_bytes"]
        timed = row["seconds"] is not None
        table.add_row(
            row["contender"],
            tables.seconds_text(row["seconds"]) if timed else "",
            f"{base / row['seconds']:.3f} x" if timed and base else "",
            f"{row['tokens_per_second_a_rank']:,.0f}" if timed else "",
            "" if peak is None else f"{peak / 2**30:.4g} GiB",
            *(f"{row['bytes'][kind] / 1e6:.5g} MB" if kind in row["bytes"] else "" for kind in KINDS),
            *(f"{losses[at]:.6f}" if losses else "" for at in (0, -1)),
        )
    Console(width=180).print(table)


def measure_layers(
    settings: LayerSettings, ranks: Ranks, device: torch.device, path: Path
) -> tuple[list[compare.Row], list[str]]:
    """Rows of whole layers, which rank 0 writes to ``path`` after each contestant, and :func:`failures` of them."""

    def note(order: str, rows: list[compare.Row]) -> None:
        for row in rows:
            if row["seconds"] is not None:
                row["tokens_per_second_a_rank"] = row["tokens_per_second"] / ranks.size
        if ranks.rank == 0:
            data = {"ranks": ranks.size, "settings": vars(settings), "order": order, "failures": failures(rows)}
            write_results(path, {**data, "rows": rows})

    _, rows = compare.compare(settings, ranks, device, note)
    return rows, failures(rows)


def train_layers(settings: LayerSettings, device: torch.device, path: Path) -> None:
    """Compare whole layers on the ranks that torchrun started; exits with 1 if there is a failure."""
    try:
        with joined(device) as ranks:
            rows, failed = measure_layers(settings, ranks, device, path)
            if ranks.rank == 0:
                where = f"{ranks.size} ranks, experts over {settings.over}, attention over {settings.tp}"
                show_layers(rows, f"{settings.layers} layers of {settings.model}, {where}")
    except (AllFailedError, RankError) as error:
        print(f"the run ends here: {error}", file=sys.stderr, flush=True)
        # A normal exit waits for collectives that the other ranks will not join.
        os._exit(1)
    if failed:
        if ranks.rank == 0:
            print("\n".join(failed), file=sys.stderr, flush=True)
        raise typer.Exit(1)


def main(
    shape: Annotated[str, typer.Option(help="A set of shapes of experts.")] = "deepseek-v3",
    names: Annotated[str, typer.Option("--recipes", help="Separated by commas.")] = "rowwise,blockwise",
    steps: Annotated[int, typer.Option(help="Timed steps; of whole layers all steps.", min=1)] = 20,
    layers: Annotated[int, typer.Option(help="Train so many whole decoder layers instead.", min=0)] = 0,
    model: Annotated[str, typer.Option(help=f"Sizes of the layers: {', '.join(LAYERS)}.")] = "qwen3-30b-a3b",
    batch_size: Annotated[int, typer.Option(help="Sequences a step and rank, of whole layers.", min=1)] = 2,
    seq_len: Annotated[int, typer.Option(help="Tokens (bytes of text) a sequence, of whole layers.", min=1)] = 4096,
    ep: Annotated[int, typer.Option(help="Of whole layers: ranks that share the experts; 0 for all.", min=0)] = 0,
    tp: Annotated[int, typer.Option(help="Of whole layers: ranks that share attention.", min=1)] = 1,
    gather: Annotated[bool, typer.Option(help="Of whole layers: gather weights in 8 bits.")] = False,
    compile: Annotated[bool, typer.Option(help="Compile each whole layer.")] = False,
    data: Annotated[Path | None, typer.Option(help="Text. [default: Python's standard library]")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for experts-over-ranks-SHAPE.json.")] = None,
) -> None:
    """Compare what travels, on the ranks that torchrun started."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
    folder = out or results_folder()
    if layers:
        try:
            settings = LayerSettings(
                model, tuple(names.split(",")), steps, batch_size, seq_len, int(os.environ["WORLD_SIZE"]) // tp, tp,
                compile=compile, peers=False, data=None if data is None else str(data), find_unchanged=True,
                layers=layers, ep=ep, gather=gather,
            )  # fmt: skip
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        ways = {f"ep{ep}": ep, f"tp{tp}": tp > 1, "gather": gather, "compiled": compile}
        ending = "".join(f"-{name}" for name, chosen in ways.items() if chosen)
        train_layers(settings, device, folder / f"experts-over-ranks-{model}-{layers}-layers{ending}.json")
        return
    (chosen,) = (each for each in SHAPES["experts"] if each.set == shape)
    with joined(device) as ranks:
        rows = [measure(each, chosen, device, steps) for each in contestants(tuple(names.split(",")))]
        for row in rows:
            # The slowest rank counts.
            row["seconds"] = max(each for each in ranks.exchange(row["seconds"]))
        if ranks.rank == 0:
            path = folder / f"experts-over-ranks-{shape}.json"
            write_results(path, {"ranks": ranks.size, "size": chosen.size, "rows": rows})
            show(rows, f"{shape}, experts over {ranks.size} ranks")


if __name__ == "__main__":
    typer.run(main)
