"""Bars: the ratios between rows of the same run that the package must reach."""

from bench import shapes
from bench.contest import cases, grouped
from bench.contest.judge import EXTRA, HIGHEST, MEAN, MORE, Bar
from bench.shapes import ALL_MODELS, BAR_GEMMS

# The epilogue should cost no measurable time: rounds of one GEMM differ by more than 2%.
EPILOGUE_SHARE = 0.98

# Of each case and accumulation: geometric mean and lowest over the shapes of BAR_GEMMS.
_GEMM_BARS = {
    ("rowwise", "precise"): (1.07, 0.98),
    ("tensorwise", "precise"): (1.03, 0.97),
    ("rowwise", "fast"): (1.01, 0.97),
    ("tensorwise", "fast"): (1.03, 0.97),
}


def _products() -> list[Bar]:
    bars = []
    for (case, accumulation), (mean, lowest) in _GEMM_BARS.items():
        own, peer = f"tritonfp8 {accumulation}", f"torch {accumulation}"
        common = ("gemm", "scaled_matmul", case, own, peer)
        what = f"{case} GEMM, {accumulation}, over torch._scaled_mm"
        bars += [
            Bar(f"{what}, large shapes", *common, mean, BAR_GEMMS, reduce=MEAN),
            Bar(f"{what}, each large shape", *common, lowest, BAR_GEMMS),
            Bar(f"{what}, M of 1 to 256", *common, 1.0, ("decode",), reduce=MEAN),
        ]
    own, peer = "tritonfp8 precise", "torch precise"
    block = ("gemm", "scaled_matmul", "blockwise", own, peer)
    what = "blockwise GEMM (1x128 by 128x128) over F.scaled_mm"
    grad_weight = ("gemm", "scaled_matmul", "blockwise grad_weight", own, peer)
    what_t = "blockwise grad_weight GEMM (1x128 by 1x128) over F.scaled_mm"
    return [
        *bars,
        Bar(
            "rowwise GEMM, precise over our fast, large shapes",
            "gemm", "scaled_matmul", "rowwise", own, "tritonfp8 fast", 0.95, BAR_GEMMS, reduce=MEAN,
        ),
        Bar(f"{what}, large shapes", *block, 1.10, BAR_GEMMS, reduce=MEAN),
        Bar(f"{what}, M of 1 to 256", *block, 1.15, ("decode",), reduce=MEAN),
        Bar(f"{what}, each shape", *block, 1.0, (*BAR_GEMMS, "decode")),
        Bar(f"{what_t}, large shapes", *grad_weight, 1.0, BAR_GEMMS, reduce=MEAN),
        Bar(f"{what_t}, each large shape", *grad_weight, 0.96, BAR_GEMMS),
        *(
            Bar(
                f"rowwise GEMM with an epilogue of {name}, precise, over the one without",
                "gemm", "scaled_matmul", cases.EPILOGUE.name, name, cases.NO_EPILOGUE, EPILOGUE_SHARE,
                cases.EPILOGUE.sets, reduce=MEAN,
            )
            for name in cases.EPILOGUES
            if name != cases.NO_EPILOGUE
        ),
    ]  # fmt: skip


_COPY_SHARES = {
    "rowwise": 0.93,
    "1x128": 0.93,
    "128x128": 0.93,
    "1x32": 0.90,
    "1x128 both": 0.85,
    "rowwise both": 0.85,
    "tensorwise": 0.88,
}


def _casts() -> list[Bar]:
    return [
        Bar(
            f"cast {case}, each tensor of 64 MB or more: share of copy speed",
            "cast", "quantize", case, "tritonfp8", cases.COPY, bar, ("large",), quantity="share of copy speed",
        )
        for case, bar in _COPY_SHARES.items()
    ]  # fmt: skip


# One bar for each shape of the set "layers", in its order.
_LAYER_BARS = {
    "rowwise precise": (1.55, 1.38, 1.38, 1.18),
    "rowwise fast": (1.60, 1.42, 1.42, 1.20),
    "blockwise precise": (1.50, 1.35, 1.35, 1.18),
    "tensorwise precise": (1.50, 1.35, 1.35, 1.18),
}


def _layers() -> list[Bar]:
    layers = shapes.select("layer", ("layers",))
    bars = [
        Bar(
            f"linear layer, forward + backward, {contender}, over bf16, {'x'.join(map(str, shape.size))}",
            "layer", "linear", "layer", contender, "bf16", bar, ("layers",), shape.name,
        )
        for contender, values in _LAYER_BARS.items()
        for shape, bar in zip(layers, values, strict=True)
    ]  # fmt: skip
    what = "linear layer, forward + backward, tensorwise precise, over torchao tensorwise, each shape"
    mx = "linear layer, forward + backward, mxfp8 precise, over bf16, each shape"
    return [
        *bars,
        Bar(mx, "layer", "linear", "layer", "mxfp8 precise", "bf16", 0.85, ("layers",)),
        Bar(
            what, "layer", "linear", "layer", "tensorwise precise", "torchao tensorwise", 1.0, ("layers",)
        ),
    ]  # fmt: skip


_MODEL_BARS = {
    "llama 8b layers": {
        "rowwise precise": 1.50, "rowwise fast": 1.42, "tensorwise precise": 1.43, "blockwise precise": 1.43
    },
    "qwen 14b layers": {"rowwise precise": 1.47, "blockwise precise": 1.40},
    "gemma layers": {"rowwise precise": 1.42, "blockwise precise": 1.38},
    "hidden 2048 layers": {"rowwise precise": 1.33, "blockwise precise": 1.30},
    "vit h layers": {"rowwise precise": 1.25, "blockwise precise": 1.20},
    "gpt 2 xl layers": {"rowwise precise": 1.22, "blockwise precise": 1.18},
    "hidden 1024 layers": {"rowwise precise": 1.10},
}  # fmt: skip
_MEMORY_BAR, _MEMORY_SHAPE = 0.85, "llama 8b layers"
_GRAPH_BARS = {"hidden 1024 layers": 1.15}
_TORCHAO = "torchao tensorwise"


def _models() -> list[Bar]:
    bars = []
    memory = {"quantity": "peak memory ratio", "reduce": HIGHEST, "at_most": True}
    for shape, values in _MODEL_BARS.items():
        for contender, bar in values.items():
            common = ("model", "model", "model", contender, "bf16")
            what = f"{shape}, forward + backward, {contender}, over bf16"
            bars.append(Bar(what, *common, bar, ALL_MODELS, shape))
            if shape == _MEMORY_SHAPE:
                bars.append(Bar(f"{what}: peak memory", *common, _MEMORY_BAR, ALL_MODELS, shape, **memory))
    for shape, bar in _GRAPH_BARS.items():
        bars.append(
            Bar(
                f"{shape} in a CUDA graph, forward + backward, {cases.GRAPHED_VARIANT}, over bf16", "model", "model",
                cases.MODEL_GRAPH.name, cases.GRAPHED_VARIANT, "bf16", bar, ALL_MODELS, shape,
            )
        )  # fmt: skip
    peer = ("model", "model", "model", "tensorwise precise", _TORCHAO)
    what = f"models, forward + backward, tensorwise precise, over {_TORCHAO}"
    bars += [Bar(f"{what}, each", *peer, 1.0, ALL_MODELS), Bar(f"{what}, all", *peer, 1.03, ALL_MODELS, reduce=MEAN)]
    for contender in ("rowwise precise", "tensorwise precise", "blockwise precise"):
        what = f"models, forward + backward, {contender}, over {_TORCHAO}, each: peak memory"
        bars.append(Bar(what, "model", "model", "model", contender, _TORCHAO, 1.0, ALL_MODELS, **memory))
    return bars


# Of each contender and peer: geometric mean over shapes and distributions.
_OUTPUT_BARS = {
    ("rowwise precise", "torch rowwise fast"): 1.00,
    ("rowwise fast", "torch rowwise fast"): 1.05,
    ("blockwise precise", "torch rowwise precise"): 1.10,
}
_GRAD_BARS = {("rowwise precise", "torch rowwise fast"): 1.00, ("blockwise precise", "torch rowwise fast"): 0.90}
# The pair that has a bar for each shape and distribution, too.
_EACH, _EACH_OF = 0.92, {"output": ("rowwise precise", "torch rowwise fast"), "grad_weight": None}
_MIXTURE_BARS = {"deepseek-v3": 1.35, "qwen3-30b": 1.20, "mixtral": 1.40}


def _launches() -> list[Bar]:
    most = {"reduce": HIGHEST, "at_most": True}
    calls = [
        Bar(
            f"host time of an eager {case.name} over torch._scaled_mm's",
            "launch", "launch", case.name, "tritonfp8", "torch._scaled_mm", 1.0, ("launch",),
            quantity="host time ratio", **most,
        )
        for case in cases.CALLS if not case.name.endswith("both")
    ]  # fmt: skip
    first = ("first_step", "launch", "first step")
    sets = ("first-step",)
    in_graph = [
        Bar(
            f"host time of a {op} in a compiled graph, in microseconds",
            "launch", "launch", cases.IN_GRAPH.name, op, op, 10.0, ("launch",), quantity="microseconds", **most,
        )
        for op in cases.OPS_IN_GRAPHS
    ]  # fmt: skip
    return [
        *calls,
        *in_graph,
        Bar("first step, cold: seconds beyond bf16's", *first, "cold", "bf16", 10.0, sets, quantity=MORE, **most),
        Bar(
            "first step, warm: seconds beyond bf16's", *first, "after warm-up", "bf16", 2.0, sets, quantity=MORE, **most
        ),
        Bar("first step, cold: launches beyond the second's", *first, "cold", "bf16", 0, sets, quantity=EXTRA, **most),
    ]


def _grouped() -> list[Bar]:
    bars = []
    for name, sets, limits in (
        ("output", grouped.ALL_SETS, _OUTPUT_BARS),
        ("grad_weight", grouped.TRAINED, _GRAD_BARS),
    ):
        names = tuple(case.name for case in grouped.PRODUCTS if case.name.startswith(f"grouped {name} "))
        for (contender, over), bar in limits.items():
            common = ("grouped", "grouped", names, contender, over)
            what = f"grouped {name} GEMM, {contender}, over {over}, of all distributions"
            bars.append(Bar(what, *common, bar, sets, reduce=MEAN))
            if (contender, over) == _EACH_OF[name]:
                bars.append(Bar(f"{what}, each", *common, _EACH, sets))
    casts = tuple(case.name for case in grouped.CASTS)
    for distribution in grouped.DISTRIBUTIONS:
        what = f"grouped casts of each recipe, {distribution}, over ungrouped ones, each"
        bars.append(Bar(what, "grouped", "grouped", casts, distribution, "ungrouped", 0.90, grouped.ALL_SETS))
    for name, bar in _MIXTURE_BARS.items():
        # The same code with torch's grouped GEMMs, which are faster than ours in bf16.
        common = ("experts", "experts", grouped.EXPERTS.name, "rowwise", "torch bf16")
        what = f"experts of {name}, forward + backward, rowwise, over torch bf16"
        bars.append(Bar(what, *common, bar, (name,)))
        bars.append(
            Bar(
                f"{what}: peak memory", *common, 0.90, (name,), quantity="peak memory ratio", reduce=HIGHEST,
                at_most=True,
            )
        )  # fmt: skip
    return bars


GROUPED_BARS = tuple(_grouped())
BARS = (*_products(), *_casts(), *_layers(), *_models(), *_launches(), *GROUPED_BARS)
