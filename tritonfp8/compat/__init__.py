"""What the package needs of particular versions of torch and triton, each in one place.

Exports the versions that are supported; importing this folder checks the installed ones.
"""

from tritonfp8.compat.versions import TRITON_OF_TORCH

__all__ = [
    "TRITON_OF_TORCH",
]
