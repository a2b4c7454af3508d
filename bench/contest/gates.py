"""What a result must be before its time is reported."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from tritonfp8 import Recipe, reference
from tritonfp8.recipes import GEMMS, OPERANDS
from tritonfp8.testing import assert_bitwise_equal, assert_matmul_close, sqnr, worst_tile_sqnr

# Fast accumulation has no tolerance of its own: it loses with K, to 50 dB at K = 16384 on normal data
# (bench/results/nvidia-h200/accumulation.json). A tile that is wrong or unwritten leaves 10 dB at most.
FAST_SQNR = 40.0
# Two casts that differ in how they find a power of two.
SAME_BYTES = 0.99
# A model of bench/models.py in FP8 against bf16: the noise of the format through all its layers, in the worst gradient.
# A weight that is zero, negated or another layer's leaves 0 dB at most; between that and what every recipe reaches,
# with room on both sides (tests/bench/suites/test_contest.py).
MODEL_SQNR = 14.0

Check = Callable[[Any], None]


def same_bytes(expected: Any) -> Check:
    """A check that a result is ``expected`` to the bit."""
    return lambda actual: assert_bitwise_equal(actual, expected)


def nearly_same_bytes(expected: torch.Tensor) -> Check:
    """A check that the first tensor of a result has nearly all bytes of ``expected``."""

    def check(actual: tuple[torch.Tensor, ...]) -> None:
        share = (actual[0].view(torch.uint8) == expected.view(torch.uint8)).float().mean().item()
        assert share >= SAME_BYTES, f"{share:.4%} of the bytes are right; required {SAME_BYTES:.0%}"

    return check


def same_every_time(
    function: Callable[[], Any], first: Any, runs: int, chill: Callable[[], object] = lambda: None
) -> None:
    """Assert that ``runs`` runs of a function in all give the same bits, ``first`` being what one of them gave.

    ``chill`` empties caches before every second of them.
    """
    for run in range(2, runs + 1):
        if run % 2 == 0:
            chill()
        try:
            assert_bitwise_equal(function(), first)
        except AssertionError as error:
            raise AssertionError(f"run {run} of {runs} gave other bits than the first: {error}") from error


def close_product(expected: torch.Tensor, accumulation: str) -> Check:
    """A check that a product is within the tolerances of its accumulation of ``expected`` (float32)."""

    def check(actual: torch.Tensor) -> None:
        if accumulation == "precise":
            assert_matmul_close(actual, expected, actual.dtype)
            return
        found = min(sqnr(actual, expected), worst_tile_sqnr(actual, expected))
        assert found >= FAST_SQNR, f"{found:.1f} dB, overall or in the worst tile; required {FAST_SQNR}"

    return check


def close_layer(recipe: Recipe, x: torch.Tensor, weight: torch.Tensor, grad_output: torch.Tensor) -> Check:
    """A check of ``(output, grad_input, grad_weight)`` of a linear layer: the products of the recipe, by the reference.

    The products are computed when a result is checked, one at a time: in float32 they are large.
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
            # What a recipe leaves in bf16 is torch's product, which may add up parts of a sum in bf16.
            close_product(lhs @ rhs.t(), gemm.accumulation if gemm.quantized else "fast")(actual)

    return check


def close_model(expected: Mapping[str, torch.Tensor]) -> Check:
    """A check that outputs and gradients of a model are those of bf16 but for the noise of the format, each by itself.

    The output alone tells little: it is what went around the layers, for the most part. A weight is told by the
    gradients of the weights beside it, which are products with it or with what it made.
    """

    def check(actual: Mapping[str, torch.Tensor]) -> None:
        assert actual.keys() == expected.keys()
        found = {name: sqnr(actual[name], expected[name]) for name in expected}
        worst = min(found, key=lambda name: found[name])
        assert found[worst] >= MODEL_SQNR, f"{worst}: {found[worst]:.1f} dB against bf16; required {MODEL_SQNR}"

    return check
