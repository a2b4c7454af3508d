"""The figures of one operand, measured by itself."""

from tritonfp8.workflow.health.statistics import measure_all, some_rows, whole_amax


def measure(x, spec, rows):
    """The figures of ``x [M, K]``, float64 ``[len(FIELDS)]``, of so many of its rows."""
    return measure_all(some_rows(x, rows)[None], whole_amax(x)[None], x.numel(), spec)[0]
