"""The tables of what was measured, from the data in bench/results, and README's figure."""

from docs.measured import decision, limits, results, training

TABLES = {
    **decision.TABLES,
    **{f"results {name}": make for name, make in {**results.TABLES, **limits.TABLES, **training.TABLES}.items()},
}
"""The function that makes each block, by the block's name."""
picture = results.picture

__all__ = ["TABLES", "picture"]
