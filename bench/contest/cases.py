"""The cases of the suites as data: casts, GEMMs and layers; and the formulas for bytes and FLOPs."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import tritonfp8
from bench.contest.peers import block_scaled, epilogue_scaled
from bench.shapes import BAR_GEMMS, LARGE_GEMMS, SMOKE
from tritonfp8 import Quantized, QuantSpec, Recipe, recipes, reference
from tritonfp8.recipes import GEMMS, Gemm
from tritonfp8.specs import transposed
from tritonfp8.specs.formats import FORMATS

Tensors = tuple[torch.Tensor, ...]
# The contenders that casts are compared with.
COPY, ALIKE_COPY = "copy", "copy of as many bytes"


@dataclass(frozen=True)
class Case:
    """One case of a suite. ``sets`` limits it to these sets of shapes (and ``smoke``); empty means every set."""

    name: str
    sets: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name.replace(" ", "-")

    def serves(self, shape_set: str) -> bool:
        """Whether the case runs on the shapes of this set."""
        return not self.sets or shape_set in (*self.sets, SMOKE)


@dataclass(frozen=True)
class Cast(Case):
    """A cast of ``x`` by ``spec``, of ``x.T`` by ``spec_t``, or both in one call."""

    spec: QuantSpec | None = None
    spec_t: QuantSpec | None = None

    def inputs(self, x: torch.Tensor) -> Tensors:
        """The tensors to cast."""
        return (x,)

    def run(self, x: torch.Tensor) -> Tensors:
        """Codes and scales, by the package."""
        if self.spec is not None and self.spec_t is not None:
            return sum(map(_tensors, tritonfp8.quantize_both(x, self.spec, self.spec_t)), ())
        if self.spec is not None:
            return _tensors(tritonfp8.quantize(x, self.spec))
        assert self.spec_t is not None
        return _tensors(tritonfp8.quantize(x, self.spec_t, transpose=True))

    def expected(self, x: torch.Tensor) -> Tensors:
        """Codes and scales by the reference, on the device of ``x``."""
        normal = () if self.spec is None else reference.quantize(x, *self.spec.args)
        return (*normal, *(() if self.spec_t is None else reference.quantize(x, *self.spec_t.args, True)))

    def plain(self, x: torch.Tensor) -> Tensors:
        """Codes and scales in a few lines of torch, for a compiler to fuse; whole blocks only."""
        normal = () if self.spec is None else plain_cast(x, self.spec)
        return (*normal, *(() if self.spec_t is None else plain_cast(x.t(), self.spec_t)))

    def _blocks(self) -> list[tuple[int, int]]:
        """The block of each result, in the coordinates of ``x``."""
        normal = [] if self.spec is None else [self.spec.block]
        return normal if self.spec_t is None else [*normal, transposed(self.spec_t.block)]

    def takes_whole_blocks(self, shape: tuple[int, ...]) -> bool:
        """Whether :meth:`plain` can cast a tensor of this shape: it does not support tails."""
        return all(size % b == 0 for block in self._blocks() for size, b in zip(shape, block, strict=True))

    def moved_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        """Bytes that must move at least: ``x`` is read, twice if a scale depends on a whole column, and each result
        writes one byte per element. Scales are not counted.
        """
        blocks = self._blocks()
        reads = 2 if any(rows == -1 for rows, _ in blocks) else 1
        return shape[0] * shape[1] * (reads * itemsize + len(blocks))


def _tensors(q: Quantized) -> Tensors:
    return q.qdata, q.scale


def plain_cast(x: torch.Tensor, spec: QuantSpec) -> Tensors:
    """Quantize ``x [M, N]`` in plain torch; M and N must be whole blocks."""
    rows, cols = (size if b == -1 else b for size, b in zip(x.shape, spec.block, strict=True))
    dtype = FORMATS[spec.format].dtype
    finfo = torch.finfo(dtype)
    tiles = x.float().unflatten(1, (-1, cols)).unflatten(0, (-1, rows))
    encode = finfo.max / tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-12)
    if spec.scale_rounding != "none":
        encode = torch.exp2(torch.floor(torch.log2(encode)))
    qdata = (tiles * encode).clamp(finfo.min, finfo.max).to(dtype).reshape(x.shape)
    return qdata.contiguous(), 1 / encode.squeeze((1, 3))


def _operand(recipe: str, gemm: str = "output", side: str = "lhs") -> Any:
    return getattr(getattr(recipes.get(recipe), gemm), side)


TENSOR, ROW, VECTOR, MX = (_operand(name) for name in ("tensorwise", "rowwise", "blockwise", "mxfp8"))
SQUARE = _operand("blockwise", side="rhs")

CASTS = (
    Cast("rowwise", spec=ROW),
    Cast("rowwise transposed", spec_t=ROW),
    Cast("rowwise both", spec=ROW, spec_t=ROW),
    Cast("1x128", spec=VECTOR),
    Cast("1x128 both", spec=VECTOR, spec_t=VECTOR),
    Cast("128x128", spec=SQUARE),
    Cast("tensorwise", spec=TENSOR),
    Cast("tensorwise both", spec=TENSOR, spec_t=TENSOR),
    Cast("1x32", spec=MX),
    Cast("1x32 both", spec=MX, spec_t=MX),
)


@dataclass(frozen=True)
class Product(Case):
    """A GEMM of operands quantized by ``gemm``; ``peer`` makes torch's GEMM from operands and accumulation."""

    gemm: Gemm = dataclasses.field(default_factory=Gemm)
    accumulations: tuple[str, ...] = ("precise",)
    peer: Callable[[Quantized, Quantized, str], Callable[[], torch.Tensor]] | None = None

    def quantized(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Quantized, Quantized]:
        """Both operands, quantized by the specs of the GEMM."""
        assert self.gemm.lhs is not None
        assert self.gemm.rhs is not None
        return tritonfp8.quantize(a, self.gemm.lhs), tritonfp8.quantize(b, self.gemm.rhs)


BOTH = ("precise", "fast")
GEMM_CASES = (
    Product("rowwise", gemm=recipes.get("rowwise").output, accumulations=BOTH, peer=epilogue_scaled),
    Product("tensorwise", gemm=recipes.get("tensorwise").output, accumulations=BOTH, peer=epilogue_scaled),
    Product("blockwise", gemm=recipes.get("blockwise").output, peer=block_scaled),
    Product(
        "blockwise grad_weight",
        tuple(dict.fromkeys((*LARGE_GEMMS, *BAR_GEMMS))),
        gemm=recipes.get("blockwise").grad_weight,
        peer=block_scaled,
    ),
    Product("mxfp8", ("square", "llama-8b"), gemm=recipes.get("mxfp8").output),
)

# Name -> (has a bias, activation). Each epilogue is compared with the GEMM without one.
NO_EPILOGUE = "no epilogue"
EPILOGUES: dict[str, tuple[bool, str | None]] = {
    NO_EPILOGUE: (False, None),
    "bias": (True, None),
    "bias, silu": (True, "silu"),
}
EPILOGUE = Product("rowwise epilogue", ("square", "llama-8b"), gemm=recipes.get("rowwise").output)


def gemm_flops(m: int, n: int, k: int) -> int:
    """Multiplications and additions of ``[M, K] @ [K, N]``."""
    return 2 * m * n * k


def gemm_bytes(m: int, n: int, k: int) -> int:
    """Bytes that an 8-bit GEMM must move at least: both operands are read, the bf16 result is written."""
    return m * k + n * k + 2 * m * n


FROM_CODES = ("rowwise", "blockwise", "mxfp8")
LAYER_RECIPES = ("rowwise", "tensorwise", "blockwise", "rowwise_hp_grad_weight", "mxfp8")
# Only the contenders of the bars, because compiling a model takes long.
MODEL_VARIANTS = (
    "rowwise precise", "rowwise fast", "rowwise codes", "tensorwise precise", "blockwise precise", "blockwise codes",
)  # fmt: skip
PRECISE_VARIANTS = tuple(name for name in MODEL_VARIANTS if name.endswith("precise"))


def all_fast(recipe: Recipe) -> Recipe:
    """``recipe`` with fast accumulation in all three GEMMs."""
    gemms = {gemm: dataclasses.replace(getattr(recipe, gemm), accumulation="fast") for gemm in GEMMS}
    return dataclasses.replace(recipe, name=f"{recipe.name} fast", **gemms)


def recipe_variants(names: tuple[str, ...]) -> dict[str, Recipe]:
    """Recipes by contender name: each as "precise", tensorwise and rowwise ones also with all GEMMs "fast".

    Those whose scales are powers of two also with transposed operands made from "codes".
    """
    variants: dict[str, Recipe] = {}
    for name in names:
        recipe = recipes.get(name)
        variants[f"{name} precise"] = recipe
        if recipe.output.lhs in (TENSOR, ROW) and recipe.grad_weight.quantized:
            variants[f"{name} fast"] = all_fast(recipe)
        if name in FROM_CODES:
            variants[f"{name} codes"] = recipes.get(name, transposed_from="codes")
    return variants


_CALLED = ("rowwise", "1x128", "rowwise both", "1x128 both", "blockwise")
CALLS = tuple(
    dataclasses.replace(case, name=f"{function} {case.name}")
    for function, cases in (("quantize", CASTS), ("scaled_matmul", GEMM_CASES))
    for case in cases
    if case.name in _CALLED
)
# "layer kernels" and "model kernels" measure the GPU time of each kind of kernel.
WHOLE = LAYER, LAYER_KERNELS, MODEL, MODEL_KERNELS, MODEL_GRAPH, FIRST_STEP, IN_GRAPH = tuple(
    Case(name)
    for name in (
        "layer", "layer kernels", "model", "model kernels", "model in a CUDA graph", "first step",
        "op in a compiled graph",
    )
)  # fmt: skip
# The ops whose host time inside a compiled graph is measured.
OPS_IN_GRAPHS = ("quantize", "scaled_matmul")
# Models so small that the host decides: measured as a CUDA graph, too, in this recipe.
GRAPHED_MODELS, GRAPHED_VARIANT = ("hidden 1024 layers", "dit 1152 blocks", "tiny"), "rowwise precise"
