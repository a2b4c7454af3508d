"""Rows as the suites of the benchmark write them, made up."""

from bench import shapes
from bench.contest import cases, grouped

SQUARE, UP = (8192, 8192, 8192), (16384, 14336, 4096)


def row(suite, case, shape, contender, seconds, own=False, peer=None, **fields):
    return {
        "suite": suite, "case": case, "set": shape.set, "name": shape.name, "shape": list(shape.size),
        "contender": contender, "own": own, "peer": peer, "seconds": seconds, **fields,
    }  # fmt: skip


def gemm_rows(shape, own, peer, case="rowwise", accumulation="precise"):
    work = {"flops": cases.gemm_flops(*shape.size), "bytes": cases.gemm_bytes(*shape.size)}
    name = f"torch {accumulation}"
    return [
        row("scaled_matmul", case, shape, f"tritonfp8 {accumulation}", own, True, name, **work),
        row("scaled_matmul", case, shape, name, peer, **work),
    ]


def synthetic_rows():
    """A whole run in which everything of our own takes 2 s where peers take 3."""
    rows = []
    for case in cases.CASTS:
        for shape in shapes.select("cast"):
            work = {"bytes": case.moved_bytes(shape.size, 2)}
            rows.append(row("quantize", case.name, shape, "tritonfp8", 2.0, True, "copy", **work))
            rows.append(row("quantize", case.name, shape, "copy", 3.0, bytes=2 * work["bytes"]))
    for case in cases.GEMM_CASES:
        for shape in filter(lambda s: case.serves(s.set), shapes.select("gemm")):
            for accumulation in case.accumulations:
                rows += gemm_rows(shape, 2.0, 3.0, case.name, accumulation)
    for shape in filter(lambda s: cases.EPILOGUE.serves(s.set), shapes.select("gemm")):
        for name in cases.EPILOGUES:
            is_plain = name == cases.NO_EPILOGUE
            seconds, peer = (3.0, None) if is_plain else (2.0, cases.NO_EPILOGUE)
            rows.append(row("scaled_matmul", cases.EPILOGUE.name, shape, name, seconds, True, peer))
    layers = cases.recipe_variants(cases.LAYER_RECIPES)
    for case, kind, names, fields in (
        (cases.LAYER, "layer", layers, {}),
        (cases.LAYER_KERNELS, "layer", layers, {"gemm_seconds": 1.25, "cast_seconds": 0.15, "other_seconds": 0.1}),
        (cases.MODEL, "model", cases.MODEL_VARIANTS, {"peak_bytes": 2**30}),
    ):
        suite = {"layer": "linear"}.get(kind, kind)
        for shape in shapes.select(kind):
            contenders = [*names, "torchao tensorwise"]
            own = [row(suite, case.name, shape, name, 2.0, True, "bf16", **fields) for name in contenders[:-1]]
            peers = [row(suite, case.name, shape, name, 3.0, **fields) for name in (contenders[-1], "bf16")]
            rows += [*own, *peers]
    for shape in shapes.select("model"):
        parts = {"gemm_seconds": 1.0, "cast_seconds": 0.5, "other_seconds": 0.5}
        rows += [
            *(row("model", cases.MODEL_KERNELS.name, shape, name, 2.0, True, "bf16", **parts)
              for name in cases.PRECISE_VARIANTS),
            row("model", cases.MODEL_KERNELS.name, shape, "bf16", 3.0, gemm_seconds=2.5, cast_seconds=0.0,
                other_seconds=0.5),
        ]  # fmt: skip
    for shape in (s for s in shapes.select("model") if s.name in cases.GRAPHED_MODELS):
        rows += [
            row("model", cases.MODEL_GRAPH.name, shape, cases.GRAPHED_VARIANT, 2.0, True, "bf16"),
            row("model", cases.MODEL_GRAPH.name, shape, "bf16", 3.0),
        ]
    for op in cases.OPS_IN_GRAPHS:
        for shape in shapes.select("launch"):
            rows.append(row("launch", cases.IN_GRAPH.name, shape, op, 5e-6, True))
    for case in cases.CALLS:
        for shape in shapes.select("launch"):
            rows += [
                row("launch", case.name, shape, "tritonfp8", 2e-5, True, "torch._scaled_mm"),
                row("launch", case.name, shape, "torch._scaled_mm", 3e-5),
            ]
    for shape in shapes.select("first_step"):
        rows += [
            row("launch", "first step", shape, "cold", 30.0, True, "bf16", extra_launches=0),
            row("launch", "first step", shape, "after warm-up", 20.0, True, "bf16", extra_launches=0),
            row("launch", "first step", shape, "bf16", 19.0, extra_launches=0),
        ]
    return rows + grouped_rows()


def grouped_rows():
    """The same of grouped GEMMs and casts, and of layers of experts."""
    rows = []
    for shape in filter(lambda s: s.set != shapes.SMOKE, shapes.select("grouped", (shapes.ALL,))):
        for case in filter(lambda c: c.serves(shape.set), grouped.PRODUCTS):
            for contender in ("rowwise precise", "rowwise fast", "blockwise precise"):
                rows.append(row("grouped", case.name, shape, contender, 2.0, True))
            rows += [row("grouped", case.name, shape, f"torch rowwise {name}", 3.0) for name in ("precise", "fast")]
        for case in grouped.CASTS:
            rows += [row("grouped", case.name, shape, name, 2.0, True, "ungrouped") for name in grouped.DISTRIBUTIONS]
            rows.append(row("grouped", case.name, shape, "ungrouped", 3.0))
    for shape in shapes.select("experts", (shapes.ALL,)):
        rows += [
            row("experts", grouped.EXPERTS.name, shape, "rowwise", 2.0, True, peak_bytes=2**30),
            row("experts", grouped.EXPERTS.name, shape, "torch bf16", 3.0, False, peak_bytes=2**30),
        ]
    return rows


LLAMA = [shape for shape in shapes.select("gemm") if shape.size in (SQUARE, UP)]
