"""Hugging Face's Trainer on a whole Llama on one GPU: tokens a second, peak memory and losses, by contender.

    python -m bench.training.client --model 8b --ways lora,full --out bench/results/nvidia-h200
    python -m bench.training.client --largest 80 --out bench/results/nvidia-h200

Each run is a process. ``full`` trains all weights: ``bf16`` and ``torchao`` with torch's AdamW, a recipe with the same,
``RECIPE stored`` with weights stored in 8 bits and 8-bit moments, and ``RECIPE stored in backward`` steps each of these
when its gradient is there. ``lora`` trains adapters on a frozen base, which
a recipe stores in 8 bits. ``--largest`` finds the most layers that train in full in so many GiB.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import tritonfp8
from bench.contest.machine import results_folder, write_results
from bench.models import sums_of
from tritonfp8.training import corpus, timers

BASELINE, STORED, PEER = "bf16", " stored", "torchao "
IN_BACKWARD = f"{STORED} in backward"
CONTENDERS = f"bf16,{PEER}rowwise,rowwise,rowwise{STORED}"
WARM_UP = 5
# The shortest row of a padded batch has this share of the longest one's tokens.
SHORTEST = 0.25
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        model: a name of :data:`MODELS`.
        way: ``"full"`` or ``"lora"``.
        contender: ``"bf16"``, a recipe, a recipe and ``" stored"`` or ``" stored in backward"``, or ``"torchao "`` and
            a recipe of torchao.
        checkpointing: whether activations are recomputed in backward.
        padded: whether rows have different lengths; else a row is full.
        batch: rows of a step.
        length: tokens of the longest row.
        steps: optimizer steps; the first :data:`WARM_UP` are not timed.
        layers: so many; 0 for the model's.
        dtype: of weights that are not stored in 8 bits.
        gib: limit of the GPU's memory; 0 for all of it.
        compiled: whether the Trainer compiles.
        device: cpu or cuda.
    """

    model: str
    way: str
    contender: str
    checkpointing: bool = True
    padded: bool = False
    batch: int = 2
    length: int = 4096
    steps: int = 15
    layers: int = 0
    dtype: str = "bfloat16"
    gib: float = 0.0
    compiled: bool = True
    device: str = "cuda"

    @property
    def is_stored(self) -> bool:
        """Whether weights are stored in 8 bits."""
        return STORED in self.contender


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of bytes of text; padded ones are of different lengths, the same for every contender."""

    def __init__(self, run: Run) -> None:
        count = run.batch * run.steps
        (rows,) = corpus.batches(corpus.load(), steps=1, batch_size=count, seq_len=run.length - 1, seed=0)
        self.rows = rows.long()
        generator = torch.Generator().manual_seed(1)
        shares = SHORTEST + (1 - SHORTEST) * torch.rand(count, generator=generator)
        self.lengths = (shares * run.length).long() if run.padded else torch.full((count,), run.length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index, : self.lengths[index]]
        return {"input_ids": row, "labels": row}


def collated(rows: list[dict[str, Tensor]], length: int) -> dict[str, Tensor]:
    """A batch that is padded to ``length``, so that a compiled model sees one shape."""

    def padded(name: str, value: int) -> Tensor:
        return torch.stack([nn.functional.pad(row[name], (0, length - len(row[name])), value=value) for row in rows])

    batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}
    if all(len(row["input_ids"]) == length for row in rows):
        return batch
    return batch | {"attention_mask": (batch["labels"] != -100).long()}


def model_of(run: Run) -> nn.Module:
    """The model with random weights, converted as the contender converts it, with adapters for ``lora``."""
    import transformers

    config = {**MODELS[run.model], "use_cache": False, "max_position_embeddings": max(run.length, 2048)}
    if run.layers:
        config["num_hidden_layers"] = run.layers
    stored, lora = run.is_stored, run.way == "lora"
    recipe = run.contender.partition(STORED)[0]
    torch.manual_seed(0)
    # Weights that train as codes count as float32.
    torch.set_default_dtype(torch.float32 if stored and not lora else getattr(torch, run.dtype))
    with torch.device(run.device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    torch.set_default_dtype(torch.float32)
    if run.contender.startswith(PEER):
        _convert_by_torchao(model, run.contender.removeprefix(PEER))
    elif run.contender != BASELINE:
        ways = {"mode": "inference"} if lora else {"weight_storage": "quantized" if stored else "parameters"}
        tritonfp8.convert(model, recipe, **ways)
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=16, task_type="CAUSAL_LM"))
    return model


def _convert_by_torchao(model: nn.Module, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name,
    )


def trainer_of(run: Run, model: nn.Module, folder: str, clock: Any) -> Any:
    """transformers' Trainer of the model."""
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        output_dir=folder,
        max_steps=run.steps,
        per_device_train_batch_size=run.batch,
        learning_rate=1e-4,
        bf16=run.device == "cuda",
        use_cpu=run.device == "cpu",
        optim="adamw_torch_fused",
        gradient_checkpointing=run.checkpointing,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        torch_compile=run.compiled,
        logging_steps=1,
        save_strategy="no",
        # A norm of all gradients needs all of them at one time.
        max_grad_norm=0.0 if run.contender.endswith(IN_BACKWARD) else 1.0,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        seed=0,
    )
    optimizers: tuple[Any, Any] = (None, None)
    if run.is_stored and run.way == "full":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = tritonfp8.optim.AdamW(trained, lr=1e-4, moments="fp8")
        optimizers = (optimizer, None)
        if run.contender.endswith(IN_BACKWARD):
            step_in_backward(trained, optimizer)
    return Trainer(
        model=model,
        args=args,
        train_dataset=Rows(run),
        data_collator=lambda rows: collated(rows, run.length),
        callbacks=[clock],
        optimizers=optimizers,
    )


def step_in_backward(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Step each parameter when its gradient is there, and free the gradient."""

    def step(parameter: Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)


def _clock(device: torch.device) -> Any:
    """A callback with the times at the end of the warm-up and of the last step, and the losses."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []
            self.losses: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step in (min(WARM_UP, state.max_steps - 1), state.max_steps):
                timers.synchronize(device)
                self.times.append(time.perf_counter())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                self.losses.append(logs["loss"])

    return Clock()


def train(run: Run) -> dict[str, Any]:
    """Train once.

    Returns:
        ``tokens_per_second``, padding not counted; ``peak_gib`` of allocated memory; ``losses``; ``parameters`` of the
        model, and ``stuck``, the trainable ones that did not change.
    """
    device = torch.device(run.device)
    model = model_of(run)
    if run.gib and run.device == "cuda":
        # After the model was made in high precision, which a checkpoint in 8 bits never is.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(run.gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    before = sums_of(model)
    with tempfile.TemporaryDirectory() as folder:
        clock = _clock(device)
        trainer = trainer_of(run, model, folder, clock)
        trainer.train()
    after = sums_of(model)
    rows = Rows(run)
    timed = rows.lengths[run.batch * min(WARM_UP, run.steps - 1) :].sum().item()
    return {
        "tokens_per_second": timed / (clock.times[-1] - clock.times[0]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if run.device == "cuda" else None,
        "losses": clock.losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stuck": [name for name, sums in after.items() if sums == before[name]],
    }


def in_process(run: Run) -> dict[str, Any] | None:
    """:func:`train` in a process of its own; None if the GPU's memory is too small.

    Raises:
        RuntimeError: it failed for another reason; has the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "bench.training.client", "--one", json.dumps(asdict(run)), "--out", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            output = (done.stdout + done.stderr)[-4000:]
            if "OutOfMemoryError" in output:
                return None
            raise RuntimeError(f"{run}: exit status {done.returncode}\n{output}")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def runs_of(
    model: str, ways: list[str], checkpointing: list[str], rows: list[str], contenders: list[str],
    options: dict[str, Any],
) -> Iterator[Run]:  # fmt: skip
    """Each way, with and without checkpointing and padding, by each contender that has it."""
    for way, saved, kind in itertools.product(ways, checkpointing, rows):
        for contender in contenders:
            # A frozen base is stored anyway, and torchao's layers train in high precision only.
            if way == "full" or (STORED not in contender and PEER not in contender):
                yield Run(model, way, contender, saved == "on", kind == "padded", **options)


def largest(run: Run) -> dict[str, Any]:
    """The most layers with which ``run`` does not run out of memory, and what it gave.

    Memory grows by as much with each layer, so two small models tell where to look.
    """
    small = {layers: in_process(replace(run, layers=layers)) for layers in (1, 3)}
    if small[1] is None or small[3] is None:
        raise RuntimeError(f"not even three layers of {run} fit")
    fits, low, high = small[3], 3, None
    a_layer = (small[3]["peak_gib"] - small[1]["peak_gib"]) / 2
    layers = max(4, int(3 + (run.gib - small[3]["peak_gib"]) / a_layer))
    while high is None or high - low > 1:
        found = in_process(replace(run, layers=layers))
        if found is None:
            high = layers
        else:
            fits, low = found, layers
        layers = low + 1 if high is None else max(low + 1, high - 1)
    return {**asdict(run), "layers": low, **fits}


def _line(row: dict[str, Any], bases: dict[Any, float]) -> list[str]:
    place = row["way"], row["checkpointing"], row["padded"]
    if row.get("tokens_per_second") is None:
        return [
            row["way"],
            row["contender"],
            str(row["checkpointing"]),
            str(row["padded"]),
            "out of memory",
            "",
            "",
            "",
        ]
    if row["contender"] == BASELINE:
        bases[place] = row["tokens_per_second"]
    ratio = f"{row['tokens_per_second'] / bases[place]:.3f}" if place in bases else ""
    peak = "" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    figures = [f"{row['tokens_per_second']:.0f}", ratio, peak, f"{row['parameters'] / 1e9:.2f}"]
    return [row["way"], row["contender"], *map(str, place[1:]), *figures]


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = "8b",
    ways: Annotated[str, typer.Option(help="full, lora.")] = "full,lora",
    contenders: Annotated[
        str, typer.Option(help="Separated by commas.")
    ] = "bf16,torchao rowwise,rowwise,rowwise stored",
    checkpointing: Annotated[str, typer.Option(help="on, off.")] = "on,off",
    kinds: Annotated[str, typer.Option("--rows", help="packed, padded.")] = "packed,padded",
    layers: Annotated[int, typer.Option(help="0 for the model's.")] = 0,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = 2,
    length: Annotated[int, typer.Option(help="Tokens of a row.")] = 4096,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 15,
    largest_gib: Annotated[float, typer.Option("--largest", help="Find the largest model in so many GiB.")] = 0.0,
    compiled: Annotated[bool, typer.Option(help="The Trainer compiles.")] = True,
    one: Annotated[str, typer.Option(hidden=True)] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for client.json.")] = None,
) -> None:
    """Run, print a table, and write after each run; fails if a trainable weight did not change."""
    if one:
        assert out is not None
        out.write_text(json.dumps(train(Run(**json.loads(one)))))
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = {"batch": batch, "length": length, "steps": steps, "layers": layers, "compiled": compiled}
    options["device"] = device
    rows: list[dict[str, Any]] = []
    name = "client-largest" if largest_gib else "client-compiled" if compiled else "client"
    path = (out or results_folder()) / f"{name}.json"
    if largest_gib:
        first = Run(
            model, "full", BASELINE, batch=1, length=length, steps=3, gib=largest_gib, device=device, compiled=compiled
        )
        ours = (replace(first, contender=f"rowwise{each}") for each in (STORED, IN_BACKWARD))
        for run in (replace(first, dtype="float32"), first, *ours):
            rows.append(largest(run))
            write_results(path, {"rows": rows})
    else:
        lists = (each.split(",") for each in (ways, checkpointing, kinds, contenders))
        for run in runs_of(model, *lists, options):
            rows.append(asdict(run) | (in_process(run) or {}))
            write_results(path, {"rows": rows})
    table, bases = (
        Table("way", "contender", "checkpointing", "padded", "tokens/s", "over bf16", "GiB", "B parameters"),
        {},
    )
    for row in rows:
        table.add_row(*_line(row, bases))
    Console(width=120).print(table)
    sys.exit(any(_held(row) for row in rows))


def _held(row: dict[str, Any]) -> list[str]:
    """The stuck parameters of a run but norms in bfloat16: at 1 a step of 1e-4 is below half of its last digit."""
    rounds = row["dtype"] == "bfloat16" and STORED not in row["contender"]
    return [name for name in row.get("stuck") or [] if not (rounds and "norm" in name)]


if __name__ == "__main__":
    typer.run(main)
