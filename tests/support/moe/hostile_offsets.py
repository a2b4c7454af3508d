"""Run kernels where they could read outside of a tensor, in a process that ``compute-sanitizer`` watches.

hostile_offsets.py hostile    every kernel that reads offsets, on wrong ones
hostile_offsets.py blocks     GEMMs whose last tiles begin beyond the last 128x128 scale
hostile_offsets.py beyond     a kernel that writes beyond its tensor, which must be noticed
"""

import sys

import torch
import triton
import triton.language as tl

from tritonfp8 import ops, recipes
from tritonfp8.functional import grouped_linear
from tritonfp8.launch import gemms
from tritonfp8.specs import BLOCK_128X128, QuantSpec
from tritonfp8.tuning import chooser

# Not increasing, below zero, beyond the tokens, and the ends of int32.
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
OFFSETS = ((-5, 70, 3, 90), (90, 10, 300, 20), (INT_MAX, INT_MIN, 0, INT_MAX), (-1, -1, -1, -1), (5, 999, 1001, 7))
# So many tokens a group that MX operands are dequantized.
TOKENS, N, K = 280, 160, 288


def of_recipe(name, offsets):
    """Forward and backward of a linear layer, and the casts between two of experts."""
    x, weight, bias = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for shape in ((TOKENS, K), (len(offsets), N, K), (len(offsets), N))
    )
    grouped_linear(x, weight, offsets, bias, recipe=name).sum().backward()
    recipe = recipes.get(name)
    if recipe.output.lhs is None or recipe.grad_weight.rhs is None:
        return
    specs = (*recipe.output.lhs.args, *recipe.grad_weight.rhs.args)
    x, inner = x.detach(), torch.randn(TOKENS, 2 * K, device="cuda", dtype=torch.bfloat16)
    rows = torch.randint(TOKENS, (2 * TOKENS,), device="cuda")
    factors = torch.rand(2 * TOKENS, device="cuda", dtype=torch.bfloat16)
    ops.quantize_groups_both(x, offsets, *specs, rows, factors)
    ops.quantize_groups_both(inner, offsets, *specs, None, None, True)
    made, amax = ops.swiglu_backward_amax(x, inner, offsets, *specs)
    ops.quantize_groups_both(made, offsets, *specs, amax=amax)


def hostile():
    for values in OFFSETS:
        for name in recipes.names():
            of_recipe(name, torch.tensor(values, dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    print("ran", len(OFFSETS) * len(recipes.names()))


def blocks():
    """The second warp group of a tall tile has no rows, the right half of a wide one has no columns."""
    spec = QuantSpec("e4m3", BLOCK_128X128, "fp32", "pow2").args
    a, b = (ops.quantize(torch.randn(rows, 512, device="cuda"), *spec) for rows in (128, 256))
    tall = [config for config in chooser.space("blockwise", "precise") if config.specialized and config.block_m == 256]
    assert tall
    for config in tall:
        gemms.scaled_matmul(*a, *spec, *b, *spec, config=config)
    # So many tokens an expert that the tiles are wide.
    offsets = torch.tensor((400, 1000), dtype=torch.int32, device="cuda")
    x = torch.randn(1000, 512, device="cuda", dtype=torch.bfloat16)
    grouped_linear(x, x.new_ones(2, 272, 512), offsets, recipe="blockwise")
    torch.cuda.synchronize()
    print("ran blocks")


@triton.jit
def write_beyond_kernel(out_ptr, place):
    tl.store(out_ptr + place, 1.0)


def beyond():
    write_beyond_kernel[1,](torch.empty(16, device="cuda"), 2**24)
    torch.cuda.synchronize()


if __name__ == "__main__":
    {"hostile": hostile, "blocks": blocks, "beyond": beyond}[sys.argv[1]]()
