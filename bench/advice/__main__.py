"""``python -m bench.advice``."""

import typer

from bench.advice.run import main

if __name__ == "__main__":
    typer.run(main)
