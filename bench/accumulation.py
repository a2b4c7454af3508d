"""What fast accumulation costs, by K and by the sign of the data: ``python -m bench.accumulation``."""

import argparse
from pathlib import Path

import torch

from bench.machine import require_gpu, results_folder, write_results
from tritonfp8.doctor import accumulation_figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="default: bench/results/<gpu>/accumulation.json")
    out = parser.parse_args().out
    require_gpu()
    out = out or results_folder() / "accumulation.json"
    rows = [{"k": k, "data": data, **figures} for k, data, figures in accumulation_figures(torch.device("cuda"))]
    for row in rows:
        print(f"K = {row['k']:<6} {row['data']:<16} precise {row['precise']:.1f} dB, fast {row['fast']:.1f} dB")
    write_results(out, {"unit": "dB SQNR", "rows": rows})


if __name__ == "__main__":
    main()
