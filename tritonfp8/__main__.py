"""``python -m tritonfp8`` is the ``tritonfp8`` command."""

from tritonfp8.cli import main

if __name__ == "__main__":
    main()
