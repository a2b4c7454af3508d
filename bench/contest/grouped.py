"""Grouped GEMMs as the suite measures them: sizes of groups, operands, torch's peers, and the result in float32."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tritonfp8
from bench.contest.cases import BOTH, Case
from bench.contest.gates import Part
from bench.shapes import Shape
from tritonfp8 import QuantizedGroups, QuantSpec, recipes, reference
from tritonfp8.functional import quantize_groups, quantize_matrices
from tritonfp8.specs import group_column

UNIFORM, ZIPF, EMPTY, ONE = "uniform", "zipf", "zipf with an empty expert", "one expert"
DISTRIBUTIONS = (UNIFORM, ZIPF, EMPTY, ONE)
# By recipe: the accumulations of its GEMMs that are measured.
RECIPES: Mapping[str, tuple[str, ...]] = {
    "rowwise": BOTH,
    "blockwise": ("precise",),
    "tensorwise": ("precise",),
    "mxfp8": ("precise",),
}
PEER_RECIPE = "rowwise"
Function = Callable[[], Any]
Operands = tuple[QuantizedGroups, QuantizedGroups]


def group_ends(distribution: str, rows: int, groups: int, multiple: int = 1) -> list[int]:
    """The end of each group: ``rows`` split by a distribution. Ends are multiples of ``multiple``, which divides rows.

    The groups of a Zipf distribution have sizes of 1, 1/2, 1/3, ..., in an order that is the same in each call.
    """
    weights = [1.0] * groups
    if distribution in (ZIPF, EMPTY):
        order = torch.randperm(groups, generator=torch.Generator().manual_seed(0)).tolist()
        weights = [1 / (1 + rank) for rank in order]
    if distribution == EMPTY:
        weights[groups // 2] = 0.0
    elif distribution == ONE:
        weights = [float(group == groups // 2) for group in range(groups)]
    done = list(itertools.accumulate(weights))
    return [multiple * round(rows // multiple * each / done[-1]) for each in done]


def _dequantized(x: Tensor, spec: QuantSpec, transpose: bool = False) -> Tensor:
    """``x`` as it is after quantization by itself, which is how each group must be quantized."""
    return reference.dequantize(*reference.quantize(x, *spec.args, transpose), *spec.args, torch.float32)


class Problem:
    """The tensors of a grouped GEMM.

    Attributes:
        x: ``[T, K]``: the rows of all experts.
        offsets: ``[E]``: the end of each expert's rows.
        bounds: the first row and the end of each expert, on the host.
        multiple: each end is a multiple of it.
    """

    multiple = 1

    def __init__(self, shape: Shape, distribution: str, device: torch.device) -> None:
        self.rows, self.groups, self.n, self.k = shape.size
        self.options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        self.x = torch.randn(self.rows, self.k, **self.options)
        ends = group_ends(distribution, self.rows, self.groups, self.multiple)
        self.bounds = list(itertools.pairwise([0, *ends]))
        self.offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        self._operands: dict[str, Operands] = {}

    @property
    def filled(self) -> list[tuple[int, int, int]]:
        """Group, first row and end of the groups that have rows."""
        return [(group, start, end) for group, (start, end) in enumerate(self.bounds) if end > start]

    def work(self) -> dict[str, int]:
        """FLOPs, as a field of a row."""
        return {"flops": 2 * self.rows * self.n * self.k}

    def quantized(self, recipe: str) -> Operands:
        """Both operands. Contenders that differ in accumulation share them."""
        if recipe not in self._operands:
            self._operands[recipe] = self._quantized(recipe)
        return self._operands[recipe]

    def _quantized(self, recipe: str) -> Operands:
        raise NotImplementedError

    def own(self, recipe: str, accumulation: str) -> Function:
        """The package's GEMM, of operands that are already quantized."""
        raise NotImplementedError

    def bf16(self) -> Function:
        """Torch's GEMM in bf16."""
        raise NotImplementedError

    def fp8(self, accumulation: str) -> Function:
        """Torch's GEMM of the package's own rowwise operands."""
        raise NotImplementedError

    def parts(self, recipe: str) -> Iterator[Part]:
        """The GEMMs of the groups that have rows, one after the other, of operands that are quantized by group."""
        raise NotImplementedError

    def parts_of_peer(self) -> Iterator[Part]:
        """The same of :meth:`fp8`, with their places in its result."""
        return self.parts(PEER_RECIPE)

    def zero(self, result: Tensor) -> Iterator[Tensor]:
        """The parts of an own result that must be zero: the results of groups without rows."""
        return iter(())


class Output(Problem):
    """``x @ weight[g].T`` for the rows of each group g."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weight = torch.randn(self.groups, self.n, self.k, **self.options)

    def _quantized(self, recipe: str) -> Operands:
        gemm = recipes.get(recipe).output
        return quantize_groups(self.x, self.offsets, gemm.lhs), quantize_matrices(self.weight, gemm.rhs)

    def own(self, recipe: str, accumulation: str) -> Function:
        a, b = self.quantized(recipe)
        return lambda: tritonfp8.scaled_grouped_matmul(a, b, self.offsets, accumulation=accumulation)

    def bf16(self) -> Function:
        weight = self.weight.transpose(-2, -1)
        return lambda: torch._grouped_mm(self.x, weight, offs=self.offsets)

    def fp8(self, accumulation: str) -> Function:
        a, b = self.quantized(PEER_RECIPE)
        scales = (a.scale.reshape(-1).contiguous(), b.scale.reshape(self.groups, -1).contiguous())
        return lambda: torch._scaled_grouped_mm(
            a.qdata, b.qdata.transpose(-2, -1), *scales, offs=self.offsets, out_dtype=torch.bfloat16,
            use_fast_accum=accumulation == "fast",
        )  # fmt: skip

    def parts(self, recipe: str) -> Iterator[Part]:
        gemm = recipes.get(recipe).output
        for group, start, end in self.filled:
            lhs, rhs = _dequantized(self.x[start:end], gemm.lhs), _dequantized(self.weight[group], gemm.rhs)
            yield Part(group, slice(start, end), lhs @ rhs.t(), self.k)


class GradWeight(Problem):
    """``grad[g].T @ x[g]`` over the rows of each group g, ``[E, N, K]``."""

    # Torch's FP8 kernels need groups that begin at multiples of 16 bytes.
    multiple = 16

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.grad = torch.randn(self.rows, self.n, **self.options)

    def _quantized(self, recipe: str) -> Operands:
        gemm = recipes.get(recipe).grad_weight
        lhs, rhs = (
            quantize_groups(x, self.offsets, spec, transpose=True)
            for x, spec in ((self.grad, gemm.lhs), (self.x, gemm.rhs))
        )
        return lhs, rhs

    def own(self, recipe: str, accumulation: str) -> Function:
        a, b = self.quantized(recipe)
        return lambda: tritonfp8.scaled_grouped_matmul(
            a, b, self.offsets, accumulation=accumulation, tokens=self.rows
        )  # fmt: skip

    def _of_filled(self, multiply: Callable[[Tensor], Tensor]) -> Function:
        """``multiply`` for the groups that have rows, and zeros for the others: torch's FP8 kernels assert that each
        group has rows, and an assertion that fails on a GPU ends all work of the process there.

        Args:
            multiply: takes the ends of the groups that have rows.
        """
        ends = torch.tensor([end for *_, end in self.filled], dtype=torch.int32, device=self.offsets.device)
        empty = self.groups - len(ends)
        return lambda: (multiply(ends), torch.zeros(empty, self.n, self.k, **self.options) if empty else None)[0]

    def bf16(self) -> Function:
        return self._of_filled(lambda ends: torch._grouped_mm(self.grad.t(), self.x, offs=ends))

    def fp8(self, accumulation: str) -> Function:
        """The operands are copied without the gaps between the groups."""
        columns = torch.cat(
            [group_column(start, group) + torch.arange(end - start) for group, start, end in self.filled]
        ).to(self.offsets.device)
        groups = torch.tensor([group for group, *_ in self.filled], device=self.offsets.device)
        (a, b), (a_scale, b_scale) = zip(
            *((_picked(q.qdata, columns), q.scale.t()[groups].reshape(-1)) for q in self.quantized(PEER_RECIPE)),
            strict=True,
        )
        return self._of_filled(
            lambda ends: torch._scaled_grouped_mm(
                a, b.t(), a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=accumulation == "fast"
            )
        )

    def parts(self, recipe: str) -> Iterator[Part]:
        gemm = recipes.get(recipe).grad_weight
        for group, start, end in self.filled:
            lhs, rhs = (
                _dequantized(x[start:end], spec, True) for x, spec in ((self.grad, gemm.lhs), (self.x, gemm.rhs))
            )
            yield Part(group, group, lhs @ rhs.t(), end - start)

    def parts_of_peer(self) -> Iterator[Part]:
        return (part._replace(place=place) for place, part in enumerate(self.parts(PEER_RECIPE)))

    def zero(self, result: Tensor) -> Iterator[Tensor]:
        return (result[group] for group, (start, end) in enumerate(self.bounds) if end == start)


def _picked(codes: Tensor, columns: Tensor) -> Tensor:
    # Not every device picks 8-bit floats.
    return codes.view(torch.uint8)[:, columns].view(codes.dtype)


@dataclass(frozen=True)
class GroupedProduct(Case):
    """A grouped GEMM of groups by a distribution."""

    problem: type[Problem] = Output
    distribution: str = UNIFORM


@dataclass(frozen=True)
class GroupedCast(Case):
    """The cast of the rows of all experts, untransposed and transposed, as a recipe's GEMMs read them."""

    recipe: str = ""

    @property
    def specs(self) -> tuple[QuantSpec, QuantSpec]:
        """Of the untransposed result, and of the transposed one."""
        recipe = recipes.get(self.recipe)
        return recipe.output.lhs, recipe.grad_weight.rhs


TRAINED = ("deepseek-v3", "qwen3-30b", "mixtral", "gpt-oss")
ALL_SETS = (*TRAINED, "decode")
PRODUCTS = tuple(
    GroupedProduct(f"grouped {name} {distribution}", sets, problem, distribution)
    for distribution in DISTRIBUTIONS
    for name, problem, sets in (("output", Output, ()), ("grad_weight", GradWeight, TRAINED))
)
CASTS = tuple(GroupedCast(f"grouped cast {recipe}", (), recipe) for recipe in RECIPES)
# The second one measures the GPU time of each kind of kernel.
OF_EXPERTS = EXPERTS, EXPERTS_KERNELS = Case("mixture of experts"), Case("mixture of experts kernels")
