"""``tritonfp8 warmup`` as a file for torchrun: ``torchrun --nproc-per-node 8 bench/warm_up.py --model 8b-slice``."""

import typer

from tritonfp8.cli.warmup import warmup

if __name__ == "__main__":
    typer.run(warmup)
