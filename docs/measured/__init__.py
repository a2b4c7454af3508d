"""The tables of what was measured, from the data in bench/results, and README's figure."""

from docs.measured import advice, checkpoints, decision, limits, results, rollout, torchtitan, training, transposes

TABLES = {
    **decision.TABLES,
    **{
        f"results {name}": make
        for of in (advice, checkpoints, results, limits, rollout, torchtitan, training, transposes)
        for name, make in of.TABLES.items()
    },
}
"""The function that makes each block, by the block's name."""
picture = results.picture

__all__ = ["TABLES", "picture"]
