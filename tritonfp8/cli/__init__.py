"""The ``tritonfp8`` command.

Its entry point is ``tritonfp8_command``, which prints the help without this package. Exports ``main``.
"""

from tritonfp8_command import main

__all__ = ["main"]
