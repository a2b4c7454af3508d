"""The ``tritonfp8`` command.

Exports its entry point, ``main``.
"""

from tritonfp8.cli.app import main

__all__ = [
    "main",
]
