"""Public modules: ``nn.Linear`` with a recipe."""

from tritonfp8.layers.linear import Float8Linear, require_module

__all__ = ["Float8Linear", "require_module"]
