"""Layers that read the same input, which they quantize once."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from tritonfp8.functional import SharedInput


def share_inputs(model: nn.Module, layers: Collection[nn.Module], new: Collection[nn.Module]) -> None:
    """Let sibling layers (one parent, equal ``in_features``) quantize an input once that all of them read.

    Siblings that were all converted before share already.
    """
    for parent in model.modules():
        groups: dict[int, list[nn.Module]] = {}
        for child in parent.children():
            if child in layers:
                groups.setdefault(child.in_features, []).append(child)  # type: ignore[arg-type]
        for siblings in groups.values():
            if len(siblings) > 1 and any(child in new for child in siblings):
                for child, shared in zip(siblings, SharedInput.group(len(siblings)), strict=True):
                    child.shared_input = shared  # type: ignore[assignment]


def unshare_inputs(model: nn.Module) -> None:
    """Undo :func:`share_inputs`."""
    for module in model.modules():
        module.__dict__.pop("shared_input", None)
