"""Gates: checks that a result must pass before its time is reported."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from tritonfp8 import Recipe, reference
from tritonfp8.recipes import GEMMS, OPERANDS
from tritonfp8.specs.testing import (
    FAST_SQNR,
    FAST_TOLERANCE,
    MODEL_SQNR,
    SAME_BYTES,
    assert_bitwise_equal,
    assert_matmul_close,
    sqnr,
    worst_tile_sqnr,
)

Check = Callable[[Any], None]
# The longest contraction that FAST_SQNR is about.
FAST_DEPTH = 16384


def same_bytes(expected: Any) -> Check:
    """A check that a result equals ``expected`` to the bit."""
    return lambda actual: assert_bitwise_equal(actual, expected)


def nearly_same_bytes(expected: torch.Tensor) -> Check:
    """A check that nearly all bytes of a result's first tensor equal the bytes of ``expected``."""

    def check(actual: tuple[torch.Tensor, ...]) -> None:
        share = (actual[0].view(torch.uint8) == expected.view(torch.uint8)).float().mean().item()
        assert share >= SAME_BYTES, f"{share:.4%} of the bytes are right; required {SAME_BYTES:.0%}"

    return check


def same_every_time(
    function: Callable[[], Any], first: Any, runs: int, chill: Callable[[], object] = lambda: None
) -> None:
    """Assert that ``runs`` runs of a function give the same bits. ``first`` is the result of the first run.

    ``chill`` flushes caches before every second run.
    """
    for run in range(2, runs + 1):
        if run % 2 == 0:
            chill()
        try:
            assert_bitwise_equal(function(), first)
        except AssertionError as error:
            raise AssertionError(f"run {run} of {runs} gave other bits than the first: {error}") from error


def close_gemm(expected: torch.Tensor, accumulation: str, fast: float = FAST_SQNR) -> Check:
    """A check that a GEMM's result is close to ``expected`` (float32), by the tolerance of its accumulation.

    ``fast`` is the least SQNR of fast accumulation.
    """

    def check(actual: torch.Tensor) -> None:
        if accumulation == "precise":
            assert_matmul_close(actual, expected, actual.dtype)
            return
        found = min(sqnr(actual, expected), worst_tile_sqnr(actual, expected))
        assert found >= fast, f"{found:.1f} dB, overall or in the worst tile; required {fast}"

    return check


class Part(NamedTuple):
    """The GEMM of one group.

    Attributes:
        group: which one.
        place: of its result in the result of all groups.
        product: float32.
        depth: the length of its contraction.
    """

    group: int
    place: slice | int
    product: torch.Tensor
    depth: int


def close_groups(
    parts: Callable[[], Iterable[Part]],
    accumulation: str,
    zero: Callable[[torch.Tensor], Iterator[torch.Tensor]] = lambda result: iter(()),
) -> Check:
    """A check of a grouped GEMM: the result of each group is close to its GEMM.

    Args:
        parts: the GEMMs of the groups, which are computed one at a time during the check.
        accumulation: see :func:`close_gemm`.
        zero: the parts of a result that must be zero.
    """

    def check(actual: torch.Tensor) -> None:
        for part in parts():
            fast = FAST_SQNR if part.depth <= FAST_DEPTH else FAST_TOLERANCE.worst_tile
            try:
                close_gemm(part.product, accumulation, fast)(actual[part.place])
            except AssertionError as error:
                raise AssertionError(f"group {part.group}: {error}") from error
        assert not any(x.any() for x in zero(actual)), "a group without rows has a result that is not zero"

    return check


def close_layer(recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor) -> Check:
    """A check of a linear layer's ``(output, grad_input, grad_weight)`` against the reference of the recipe's GEMMs.

    The expected tensors are computed one at a time during the check, because in float32 they are large.
    """
    tensors = {"input": x, "weight": weight, "grad_output": grad_output}
    tensors |= {f"{name}.T": tensor.t() for name, tensor in tensors.items()}

    def operand(name: str, spec: Any) -> torch.Tensor:
        tensor = tensors[name].detach()
        if spec is None:
            return tensor.float()
        return reference.dequantize(*reference.quantize(tensor, *spec.args), *spec.args, torch.float32)

    def check(results: tuple[torch.Tensor, ...]) -> None:
        for name, actual in zip(GEMMS, results, strict=True):
            gemm = getattr(recipe, name)
            lhs, rhs = (operand(*pair) for pair in zip(OPERANDS[name], (gemm.lhs, gemm.rhs), strict=True))
            # GEMMs that a recipe leaves in bf16 are torch's, which may add partial sums in bf16.
            close_gemm(lhs @ rhs.t(), gemm.accumulation if gemm.quantized else "fast")(actual)

    return check


def close_model(expected: Mapping[str, torch.Tensor]) -> Check:
    """A check that each output and gradient of a model equals bf16's, except for the noise of the format.

    The output shows little, because most of it is the residual stream. A wrong weight shows in the gradients of
    neighbouring weights, which are GEMMs with that weight or with its output.
    """

    def check(actual: Mapping[str, torch.Tensor]) -> None:
        assert actual.keys() == expected.keys()
        found = {name: sqnr(actual[name], expected[name]) for name in expected}
        worst = min(found, key=lambda name: found[name])
        assert found[worst] >= MODEL_SQNR, f"{worst}: {found[worst]:.1f} dB against bf16; required {MODEL_SQNR}"

    return check
