"""``python -m bench.scale``."""

from bench.scale.run import app

if __name__ == "__main__":
    app()
