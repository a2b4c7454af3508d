"""Shapes of the suites, in named sets; ``--shapes SET`` selects sets by name.

``python -m bench.shapes square llama-8b`` prints the GEMMs of these sets as ``tritonfp8 warmup --shapes`` reads them.
The configurations that ship with the package were tuned with its default output, and with ``bench.tune`` for small M
and for fast accumulation.

``size`` is, by kind:

- ``gemm``: ``(M, N, K)`` of ``[M, K] @ [N, K].T``
- ``cast``: ``(rows, cols)`` of a bf16 tensor
- ``layer``: ``(M, K, N)``: tokens, in features, out features
- ``model``: ``(layers, hidden, ffn, heads, kv_heads, batch, sequence)``; its name is of a row of ``bench.models``
- ``grouped``: ``(T, E, N, K)``: tokens, experts, out features, in features
- ``experts``: ``(tokens, top_k, experts, hidden, intermediate)`` of a layer of a mixture of experts
- ``launch``: ``(M, N, K)``, so small that host time dominates
- ``first_step``: ``(batch, sequence)``; the shape's name is a model of ``tritonfp8.training.models.MODELS``
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

SMOKE = "smoke"
ALL = "all"
TOKENS = (4096, 16384)
DECODE_TOKENS = (1, 8, 16, 32, 64, 128, 256)
LARGE_CAST_BYTES = 64 * 10**6


@dataclass(frozen=True)
class Shape:
    """One shape: its set, a name, and its size (see the module's docstring)."""

    set: str
    name: str
    size: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.set}:{'x'.join(map(str, self.size))}"


def _projections(hidden: int, kv: int, ffn: int) -> dict[str, tuple[int, int]]:
    """(N, K) of the linear layers of a Llama with ``kv`` features of keys and of values."""
    return {"q, o": (hidden, hidden), "k, v": (kv, hidden), "gate, up": (ffn, hidden), "down": (hidden, ffn)}


# Projections of the same input are fused: q_a with kv_a, an expert's gate with its up.
_DEEPSEEK_V3 = {
    "q_a + kv_a": (2112, 7168),
    "q_b": (24576, 1536),
    "kv_b": (32768, 512),
    "o": (7168, 16384),
    "expert gate + up": (4096, 7168),
    "expert down": (7168, 2048),
}
# Layers of other models. The tuned tables have none of these sizes, so they measure how well a configuration is chosen.
_UNTUNED = (
    (16384, 5120, 17408),
    (16384, 17408, 5120),
    (16384, 1600, 6400),
    (16384, 7168, 5120),
    (8192, 24576, 3072),
    (8192, 3072, 24576),
    (8192, 6400, 1600),
    (12608, 5120, 1280),
    (32768, 6144, 2048),
    (2048, 8192, 28672),
)
# Drawn by ``shuf`` among the layers of 19 models with 4096, 8192 and 16384 tokens. The sizes are in config.json of the
# named model on the Hugging Face Hub. The cost model was not fitted to them.
_DRAWN = {
    "google/gemma-2-2b down, 8192 tokens": (8192, 2304, 9216),
    "google/gemma-2-2b down, 16384 tokens": (16384, 2304, 9216),
    "google/gemma-2-27b o, 8192 tokens": (8192, 4608, 4096),
    "google/gemma-2-27b o, 16384 tokens": (16384, 4608, 4096),
    "Qwen/Qwen2.5-7B o": (16384, 3584, 3584),
    "Qwen/Qwen2.5-7B gate, up": (8192, 18944, 3584),
    "meta-llama/Llama-3.2-3B o": (8192, 3072, 3072),
    "meta-llama/Llama-3.2-3B q + k + v": (8192, 5120, 3072),
    "mistralai/Mistral-Small-24B-Base-2501 down": (8192, 5120, 32768),
    "01-ai/Yi-34B down": (8192, 7168, 20480),
}
_DECODE = {"llama-8b q, o": (4096, 4096), "llama-8b gate, up": (14336, 4096), "llama-8b down": (4096, 14336)}


# By model: rows of all experts, experts on a GPU, and (N, K) of linear layers of an expert.
_MIXTURES = {
    "deepseek-v3": (32768, 32, {"gate + up": (4096, 7168), "down": (7168, 2048)}),
    "qwen3-30b": (131072, 128, {"gate + up": (1536, 2048), "down": (2048, 768)}),
    # 64 tokens, 8 experts each.
    "decode": (512, 128, {"qwen3-30b gate + up": (1536, 2048)}),
    "mixtral": (32768, 8, {"gate": (14336, 4096)}),
    "gpt-oss": (16384, 32, {"gate + up": (5760, 2880)}),
}


def _set(name: str, tokens: Iterable[int], layers: dict[str, tuple[int, int]]) -> tuple[Shape, ...]:
    return tuple(Shape(name, f"{what}, {m} tokens", (m, *nk)) for m, (what, nk) in product(tokens, layers.items()))


def _sizes(name: str, **sizes: tuple[int, ...]) -> tuple[Shape, ...]:
    return tuple(Shape(name, what.replace("_", " "), size) for what, size in sizes.items())


def _experts() -> tuple[tuple[Shape, ...], ...]:
    return tuple(
        tuple(Shape(name, f"{what}, {experts} experts", (rows, experts, *nk)) for what, nk in layers.items())
        for name, (rows, experts, layers) in _MIXTURES.items()
    )


_SETS = (
    (
        "gemm",
        _sizes("square", square=(8192, 8192, 8192)),
        _set("llama-8b", TOKENS, _projections(4096, 1024, 14336)),
        _set("deepseek-v3", (4096,), _DEEPSEEK_V3),
        _set("decode", DECODE_TOKENS, _DECODE),
        _set("decode", (64, 128), {k: v for k, v in _DEEPSEEK_V3.items() if k in ("o", "expert gate + up")}),
        _set("llama-70b", TOKENS, _projections(8192, 1024, 28672)),
        tuple(Shape("untuned", f"{m}x{n}x{k}", (m, n, k)) for m, n, k in _UNTUNED),
        tuple(Shape("drawn", name, size) for name, size in _DRAWN.items()),
        _set("hidden-1024", TOKENS, _projections(1024, 256, 3072)),
        _set("hidden-2048", TOKENS, _projections(2048, 512, 8192)),
        _sizes(
            "odd",
            odd_tokens=(4095, 4096, 4096),
            odd_features=(4096, 4112, 4080),
            odd_everything=(1000, 1003, 1009),
            one_row=(1, 1000, 129),
        ),
        _sizes(SMOKE, tiny=(32, 48, 256)),
    ),
    (
        "cast",
        _sizes(
            "large",
            llama_8b_input=(16384, 4096),
            llama_8b_ffn_input=(16384, 14336),
            llama_8b_weight=(14336, 4096),
            square=(8192, 8192),
            hidden_2048=(16384, 2048),
        ),
        _sizes("small", weight=(2048, 2048), decode=(256, 4096), one_row=(1, 4096)),
        _sizes("odd", odd_rows=(16383, 4096), odd_everything=(4099, 4101), narrow=(16384, 100)),
        _sizes(SMOKE, tiny=(130, 256)),
    ),
    (
        "layer",
        _sizes(
            "layers",
            llama_8b_up=(16384, 4096, 14336),
            llama_8b_o=(16384, 4096, 4096),
            llama_8b_up_4096_tokens=(4096, 4096, 14336),
            hidden_2048=(16384, 2048, 2048),
        ),
        _sizes(SMOKE, tiny=(256, 128, 192)),
    ),
    (
        "model",
        _sizes(
            "models",
            llama_8b_layers=(4, 4096, 14336, 32, 8, 4, 4096),
            hidden_2048_layers=(4, 2048, 8192, 32, 8, 2, 4096),
        ),
        _sizes(
            "other-models",
            qwen_14b_layers=(2, 5120, 17408, 40, 8, 4, 4096),
            gemma_layers=(3, 3072, 24576, 16, 16, 2, 4096),
            gqa_2048_layers=(4, 2048, 6144, 32, 4, 4, 4096),
            hidden_1024_layers=(4, 1024, 4096, 16, 16, 4, 4096),
            vit_h_layers=(6, 1280, 5120, 16, 16, 64, 197),
            gpt_2_xl_layers=(4, 1600, 6400, 25, 25, 8, 1024),
        ),
        _sizes(
            "public",
            llama_70b_layer=(1, 8192, 28672, 64, 8, 4, 4096),
            mistral_12b_layers=(2, 5120, 14336, 32, 8, 4, 4096),
            phi_3_layers=(2, 3072, 8192, 32, 32, 4, 4096),
            qwen3_4b_layers=(2, 2560, 9728, 32, 8, 4, 4096),
        ),
        _sizes(
            "diffusion",
            dit_1152_blocks=(6, 1152, 4608, 16, 16, 8, 1024),
            dit_3072_blocks=(2, 3072, 12288, 24, 24, 4, 4608),
        ),
        _sizes(
            SMOKE,
            tiny=(1, 64, 128, 2, 1, 1, 128),
            tiny_with_biases=(1, 64, 192, 2, 2, 1, 128),
            tiny_dit_blocks=(1, 64, 256, 4, 4, 2, 64),
        ),
    ),
    ("grouped", *_experts(), _sizes(SMOKE, tiny=(128, 4, 64, 96))),
    (
        "experts",
        # The 32 experts of one rank of eight, with as many rows as they have there.
        _sizes("deepseek-v3", deepseek_v3=(4096, 8, 32, 7168, 2048)),
        _sizes("qwen3-30b", qwen3_30b=(16384, 8, 128, 2048, 768)),
        _sizes("mixtral", mixtral=(16384, 2, 8, 4096, 14336)),
        _sizes(SMOKE, tiny=(64, 2, 4, 96, 64)),
    ),
    ("launch", _sizes("launch", small=(128, 768, 768)), _sizes(SMOKE, tiny=(16, 32, 128))),
    ("first_step", (Shape("first-step", "8b-slice", (4, 4096)),), (Shape(SMOKE, "tiny", (1, 16)),)),
)
SHAPES: dict[str, tuple[Shape, ...]] = {kind: sum(sets, ()) for kind, *sets in _SETS}

LARGE_GEMMS = ("square", "llama-8b", "llama-70b", "deepseek-v3")
# 17 shapes and the ten that nobody tuned.
BAR_GEMMS = ("square", "llama-8b", "llama-70b", "untuned")
ALL_MODELS = ("models", "other-models")
TUNED = ("square", "llama-8b", "deepseek-v3", "decode")
# The sets of the bars, and of experts; other sets are measured on request.
DEFAULT = (*LARGE_GEMMS, "untuned", "decode", "large", "layers", *ALL_MODELS, *_MIXTURES, "launch", "first-step")


def set_names() -> list[str]:
    """The names of all sets, each once."""
    return list(dict.fromkeys(shape.set for shapes in SHAPES.values() for shape in shapes))


def check_sets(names: Iterable[str]) -> None:
    """Raise ValueError unless every name is a set or ``all``."""
    if unknown := sorted(set(names) - {ALL, *set_names()}):
        raise ValueError(f"no set of shapes is named {', '.join(unknown)}; sets: {', '.join(set_names())}, or {ALL}")


def select(kind: str, names: Iterable[str] = ()) -> list[Shape]:
    """Shapes of a kind, in the order of :data:`SHAPES`: of the named sets, by default of :data:`DEFAULT`. The name
    ``all`` means every set but ``smoke``.

    Raises:
        ValueError: an unknown set.
    """
    chosen = set(names) or set(DEFAULT)
    check_sets(chosen)
    return [shape for shape in SHAPES[kind] if shape.set in chosen or (ALL in chosen and shape.set != SMOKE)]


def as_json(names: Iterable[str]) -> str:
    """The distinct GEMMs of the named sets, by default :data:`TUNED`, as JSON.

    Raises:
        ValueError: an unknown set.
    """
    sizes = sorted({shape.size for shape in select("gemm", tuple(names) or TUNED)})
    return json.dumps([dict(zip("mnk", size, strict=True)) for size in sizes])


if __name__ == "__main__":
    print(as_json(sys.argv[1:]))
