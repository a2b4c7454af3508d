"""Grouped GEMMs and their casts on a GPU: there are no kernels for them yet, and no silent way around them."""

from __future__ import annotations

from typing import NoReturn

from torch import Tensor


def no_kernel(x: Tensor, *args: object) -> NoReturn:
    """Raise NotImplementedError: the reference would make the host wait for the offsets, and multiply in float32."""
    raise NotImplementedError(
        f"grouped GEMMs and the casts of their operands run on a CPU only, by the reference; got a tensor on "
        f"{x.device}. Leave experts in high precision: tritonfp8.convert without experts=True, or tritonfp8.revert"
    )
