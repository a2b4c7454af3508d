"""Error of fast accumulation by K and by the sign of the data, as SQNR in dB: ``python -m bench.accumulation``."""

import torch

from bench.contest.machine import output_path, write_results
from tritonfp8.workflow import accumulation_figures


def main() -> None:
    """Measure, print, write."""
    out = output_path("accumulation", __doc__)
    rows = [{"k": k, "data": data, **figures} for k, data, figures in accumulation_figures(torch.device("cuda"))]
    for row in rows:
        print(f"K = {row['k']:<6} {row['data']:<16} precise {row['precise']:.1f} dB, fast {row['fast']:.1f} dB")
    write_results(out, {"unit": "dB SQNR", "rows": rows})


if __name__ == "__main__":
    main()
