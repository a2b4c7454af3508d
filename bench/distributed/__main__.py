"""Entry point of ``torchrun -m bench.distributed``."""

from bench.distributed.run import app

if __name__ == "__main__":
    app()
