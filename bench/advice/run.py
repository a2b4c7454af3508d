"""Try ``tritonfp8.advise`` on public models: ``python -m bench.advice [MODEL ...]``.

Each model is advised on, and then measured whole, in bf16 and as recommended. The report of each is written beside its
data, and one line a model is printed last: the recommendation, and predicted over measured times.
"""

import gc
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

import tritonfp8
from bench.contest.machine import describe_machine, results_folder, write_results
from tritonfp8.advice import from_config, from_file, plot

HERE = Path(__file__).parent
# Tokens of a batch; of models of images, the images.
BATCHES = {
    "qwen3-4b": "4x2048",
    "olmoe-1b-7b": "4x2048",
    "vit-huge": "64",
    "dit-xl-2": "8",
    "modernbert-large": "8x1024",
}
SMOKE = {"smoke": "2x32"}


def source(name: str, dtype: torch.dtype, device: torch.device | None) -> Any:
    """The model of this name and its batch."""
    if name == "smoke":
        return from_config("tiny", SMOKE[name], dtype, device)
    if name == "dit-xl-2":
        return from_file(f"{HERE / 'diffusion.py'}:build", BATCHES[name], dtype, device)
    return from_config(str(HERE / "configs" / f"{name}.json"), BATCHES[name], dtype, device)


def advise(name: str, recipes: list[str], folder: Path) -> tritonfp8.advice.Advice:
    """Advise on a model, and write the report, the data and the figure."""
    device = torch.device("cuda") if torch.cuda.is_available() else None
    found = source(name, torch.bfloat16, device)
    advice = tritonfp8.advise(
        found.model, *found.args, recipes=recipes, check=device is not None, prepare=found.prepare, **found.kwargs
    )
    write_results(folder / f"{name}.json", as_rows(advice.as_dict()))
    (folder / f"{name}.txt").write_text(f"{advice}\n")
    if advice.blocks:
        plot(advice, folder / f"{name}.png")
    return advice


def as_rows(data: dict[str, Any]) -> dict[str, Any]:
    """The data of an advice with all of its times in rows."""
    parts = ("layers", "blocks", "steps", "checks")
    rows = [{"part": part, **row} for part in parts for row in data.pop(part)]
    return {**data, "machine": describe_machine(), "host": data["machine"], "rows": rows}


def line(name: str, advice: tritonfp8.advice.Advice) -> str:
    """The recommendation for a model, and how right it was."""
    checks = [f"{c.contender} {c.predicted_seconds / c.timing.seconds:.3f}" for c in advice.checks]
    measured = [c.timing.seconds for c in advice.checks]
    speed = f", measured {measured[0] / measured[-1]:.3f} of bf16's speed" if len(measured) > 1 else ""
    return f"{name}: {advice.recommendation}{speed}; predicted / measured: {', '.join(checks) or 'not measured'}"


def main(
    models: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(BATCHES)}. [default: all]")] = None,
    recipes: Annotated[str, typer.Option(help="Recipes, separated by commas.")] = "rowwise,tensorwise",
    out: Annotated[Path | None, typer.Option(help="Folder. [default: advice in the results of this GPU]")] = None,
) -> None:
    """Measure each model, and print a line for each."""
    folder = out or results_folder() / "advice"
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in models or list(BATCHES):
        advice = advise(name, recipes.split(","), folder)
        print(advice, flush=True)
        lines.append(line(name, advice))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    print("\n".join(lines))
