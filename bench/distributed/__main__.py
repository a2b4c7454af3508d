"""Entry point of ``torchrun -m bench.distributed``."""

from bench.distributed.run import main

if __name__ == "__main__":
    main()
