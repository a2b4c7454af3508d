"""The ``tritonfp8`` command, whose help ``tritonfp8_command`` prints without this package.

Exports its entry point, ``main``.
"""

from tritonfp8_command import main

__all__ = ["main"]
