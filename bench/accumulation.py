"""Error of fast accumulation by K and by the sign of the data, as SQNR in dB: ``python -m bench.accumulation``."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.contest.machine import results_folder, write_results
from tritonfp8.workflow import accumulation_figures


def main(out: Annotated[Path | None, typer.Option(help="File. [default: in this GPU's results]")] = None) -> None:
    """Measure on a GPU, print, write."""
    rows = [{"k": k, "data": data, **figures} for k, data, figures in accumulation_figures(torch.device("cuda"))]
    for row in rows:
        print(f"K = {row['k']:<6} {row['data']:<16} precise {row['precise']:.1f} dB, fast {row['fast']:.1f} dB")
    write_results(out or results_folder() / "accumulation.json", {"unit": "dB SQNR", "rows": rows})


if __name__ == "__main__":
    typer.run(main)
