"""Grouped linear layers on groups of awkward sizes: their tensors, their results, and the parts of one group."""

from typing import NamedTuple

import torch
from cases import normal, with_gradients

from tritonfp8 import functional, recipes
from tritonfp8.compat import hardware
from tritonfp8.reference import group_bounds
from tritonfp8.specs import group_column, grouped_columns
from tritonfp8.specs.testing import assert_matmul_close

# One number of tokens, which is no multiple of 16, and of groups: kernels are then compiled once for all sizes.
TOKENS, GROUPS = 571, 8
SIZES = {
    "mixed": (0, 1, 129, 0, 7, 300, 127, 0),
    "all empty": (0,) * 8,
    "one with all": (0, 0, 571, 0, 0, 0, 0, 0),
    "even": (71,) * 8,
}
MIXED = SIZES["mixed"]
# N and K, no multiples of 128: multiples of 16, which TMA can read; odd, and a multiple of 8.
WIDTHS = [(208, 272), (137, 200)]
# Ends that decrease, lie below 0 or beyond the tokens.
HOSTILE = [
    (-5, 70, 3, 300, 299, 571, 600, 2),
    (90, 10, 3000, 1, 571, 0, -1, 5),
    (2**31 - 1, -(2**31), 0, 0, 7, 7, 2**31 - 1, 3),
    (-(2**31), -1, 0, 129, 128, 429, 2**31 - 1, -(2**31)),
]


class Layer(NamedTuple):
    """The tensors of a grouped linear layer, and the gradient of its output."""

    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad: torch.Tensor

    def to(self, *args):
        return Layer(*(x.to(*args) for x in self))


def layer_of(n=WIDTHS[0][0], k=WIDTHS[0][1], tokens=TOKENS, groups=GROUPS, device="cpu", seed=0):
    """Normal values in bfloat16."""
    shapes = (tokens, k), (groups, n, k), (groups, n), (tokens, n)
    return Layer(*(normal(*shape, seed=seed + i, dtype=torch.bfloat16) for i, shape in enumerate(shapes))).to(device)


def run(layer, offsets, recipe, needed=(True, True, True)):
    """The output, and the gradients that are needed of input, weight and bias."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(layer[:3], needed, strict=True)]
    input, weight, bias = leaves
    out = functional.grouped_linear(input, weight, offsets, bias, recipe)
    wanted = [x for x in leaves if x.requires_grad]
    assert out.requires_grad == bool(wanted)
    return with_gradients(out, wanted, layer.grad) if wanted else [out]


def casts(of, layer, offsets, recipe):
    """Every operand that a recipe quantizes, by the functions of a module, ``ops`` or ``reference``; on the CPU."""
    recipe, found = recipes.get(recipe), {}
    of_tokens = {
        "input": (layer.input, recipe.output.lhs, recipe.grad_weight.rhs),
        "grad": (layer.grad, recipe.grad_input.lhs, recipe.grad_weight.lhs),
    }
    for name, (x, spec, spec_t) in of_tokens.items():
        found[name] = of.quantize_groups(x, offsets, *spec.args)
        if spec_t is not None:
            found[f"{name} transposed"] = of.quantize_groups(x, offsets, *spec_t.args, True)
            found[f"{name} in both"] = of.quantize_groups_both(x, offsets, *spec.args, *spec_t.args)
    for transpose, gemm in ((False, recipe.output), (True, recipe.grad_input)):
        found[f"weight {transpose}"] = of.quantize_matrices(layer.weight, *gemm.rhs.args, transpose)
    return {name: [x.cpu() for x in parts] for name, parts in found.items()}


def assert_groups_close(found, expected, offsets):
    """Each group of the results of :func:`run` is as close to those in float32 as a GEMM must be; other rows are zero.

    The results in float32 are not rounded, and their operands have the same codes.
    """
    (out, grad_input, grad_weight, grad_bias), dtype = (x.cpu() for x in found), found[0].dtype
    bounds = group_bounds(offsets, len(out))
    for group, (start, end) in enumerate(bounds):
        for x, y in (
            (out[start:end], expected[0][start:end]),
            (grad_input[start:end], expected[1][start:end]),
            (grad_weight[group], expected[2][group]),
            (grad_bias[None, group], expected[3][None, group]),
        ):
            assert_matmul_close(x, y, dtype)
    for x in (out, grad_input):
        assert not x[bounds[-1][1] :].any()


def of_group(results, offsets, group):
    """The part of the results of :func:`run` that belongs to a group."""
    start, end = group_bounds(offsets, len(results[0]))[group]
    return [*(x[start:end] for x in results[:2]), *(x[group] for x in results[2:])]


def cast_of_group(q, spec, offsets, tokens, group, transpose):
    """The part of the codes and the scales of tokens that belongs to a group."""
    qdata, scale = q
    start, end = group_bounds(offsets, tokens)[group]
    if not transpose:
        return qdata[start:end], scale[group : group + 1] if spec.block[0] == -1 else scale[start:end]
    first, size = group_column(start, group), spec.block[1]
    last = first + end - start
    of_scale = slice(group, group + 1) if size == -1 else slice(first // size, -(-last // size))
    return qdata[:, first:last], scale[:, of_scale]


def soil(device):
    """Fill memory with ones, in all bits, and free it: NaN in every format, and -1 in integers.

    Blocks of all sizes, since an allocator gives back the block that fits best.
    """
    if device == "cuda":
        torch.cuda.empty_cache()
    sizes = [2**26, *(2**power for power in range(20, 8, -1) for _ in range(32))]
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    if device == "cuda":
        torch.cuda.synchronize()
    del blocks


def peak_bytes(recipe, tokens, groups, n, k):
    """What forward and backward of a layer in bfloat16 take beside its tensors: results, codes, and no scales.

    Forward ends with the output, and with the transposed input for ``grad_weight``. Backward adds the codes of the
    gradient in both orientations, and the two gradients; the codes of the weight are gone before its gradient is there.
    MX codes become bf16 for each GEMM on Hopper.
    """
    is_widened = recipe == "mxfp8" and hardware.abilities("cuda").has_warpgroup_mma
    recipe, columns, weight = recipes.get(recipe), grouped_columns(tokens, groups), groups * n * k
    out = 2 * tokens * n
    kept = k * columns if recipe.grad_weight.quantized else 0
    forward = tokens * k + weight if recipe.output.quantized else 0
    backward = tokens * n if recipe.grad_input.quantized else 0
    backward += n * columns if recipe.grad_weight.quantized else 0
    of_input, of_weight = backward + 2 * tokens * k, backward + 2 * tokens * k + 2 * weight
    if is_widened:
        forward += 2 * (tokens * k + weight)
        of_input += weight + 2 * (tokens * n + weight)
        of_weight += 2 * columns * (n + k)
    return out + kept + max(forward, of_input, of_weight)


def captured(step, device):
    """``(results, replay)``: the tensors that ``step`` returns, and what computes them again in the same memory.

    On a GPU the replay is the replay of a CUDA graph, on a CPU a call.
    """
    if device == "cpu":
        results = step()
        return results, lambda: [to.copy_(x) for to, x in zip(results, step(), strict=True)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return results, graph.replay
