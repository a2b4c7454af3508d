"""The tables of what was measured, from the data in bench/results, README's figure, and the figure of scaling."""

from docs.measured import (
    advice,
    checkpoints,
    client,
    decision,
    limits,
    results,
    rollout,
    scaling,
    torchtitan,
    training,
    transposes,
)

TABLES = {
    **decision.TABLES,
    **{
        f"results {name}": make
        for of in (advice, checkpoints, client, results, limits, rollout, scaling, torchtitan, training, transposes)
        for name, make in of.TABLES.items()
    },
}
"""The function that makes each block, by the block's name."""
picture = results.picture
scaling_figure = scaling.figure

__all__ = ["TABLES", "picture", "scaling_figure"]
