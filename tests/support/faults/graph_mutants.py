"""The faults about what compiled graphs call and how they are rewritten, as arguments of ``Mutant``."""

_PASSES = ("tests/ops/passes",)
_SUMS = ("tests/kernels/cast/test_column_sums.py",)
_WEIGHTS = ("tests/kernels/cast/test_weights.py",)

FAULTS = (
    (
        "tritonfp8/ops/direct.py",
        "        _sign_graphs()\n",
        "",
        "graphs on disk are those of another version of the package",
        ("tests/ops/test_direct.py",),
    ),
    (
        "kernels/cast/quantize.py",
        "tl.store(sums_ptr + pid_m.to(tl.int64) * N + cols,",
        "tl.store(sums_ptr + cols,",
        "the gradient of a bias is that of the rows of one tile",
        _SUMS,
    ),
    (
        "kernels/cast/quantize.py",
        "range(0, parts, TILE_P)",
        "range(0, parts - TILE_P, TILE_P)",
        "the rows of the last tile are left out of the gradient of a bias",
        _SUMS,
    ),
    (
        "kernels/cast/weights.py",
        "            part = parts\n",
        "            part = 0\n",
        "all weights of a block are scaled by the columns of the first one",
        _WEIGHTS,
    ),
    (
        "kernels/cast/weights.py",
        "        parts += tl.cdiv(m, CHUNK) * n\n",
        "        parts += tl.cdiv(m, TILE_M) * n\n",
        "weights of a block read maxima that nobody wrote",
        _WEIGHTS,
    ),
    (
        "tritonfp8/ops/passes/nodes.py",
        "elif x.target == _NEG and x.args[0].target == _NEG:\n            x = x.args[0].args[0]",
        "elif x.target == _NEG:\n            x = x.args[0]",
        "a cast of -x in a compiled graph is a cast of x",
        _PASSES,
    ),
    (
        "tritonfp8/ops/passes/batched_weights.py",
        "    return *specs, fake.dtype, fake.device",
        "    return len(specs), fake.dtype, fake.device",
        "weights of a batch are cast by the spec of the first one",
        _PASSES,
    ),
    (
        "tritonfp8/ops/passes/merged_casts.py",
        "x is not source(first.args[0]) or ",
        "",
        "a cast by the amax of another matrix is taken for one of this matrix",
        _PASSES,
    ),
    (
        "tritonfp8/compat/inductor_private.py",
        " or name not in last_used:",
        ":",
        "the gradient of SwiGLU is written over what backward reads again",
        ("tests/ops/test_in_place.py",),
    ),
    (
        "tritonfp8/ops/passes/cast_order.py",
        "        if not _is_pointwise(node):\n            return False\n",
        "",
        "a gradient is moved ahead to be written over an operand that is read later",
        _PASSES,
    ),
    (
        "tritonfp8/launch/casts/both.py",
        "    along = x.t() if reads_along_columns(x) else x\n",
        "    along = x.strided((x.shape[0] - 1, x.shape[1]), x.strides) if x.shape[0] > 1 else x\n",
        "the last row is left out of the amax of a weight",
        ("tests/kernels/cast/test_known_amax.py",),
    ),
    (
        "kernels/cast/rows.py",
        "        highest = tl.maximum(highest, magnitudes(x))\n",
        "        highest = magnitudes(x)\n",
        "the amaxes of columns that the cast of rows finds are those of the last rows",
        ("tests/kernels/cast/test_known_amax.py",),
    ),
    (
        "tritonfp8/layers/linear/dispatch.py",
        "return len(sources) == 1 and bool(seen)",
        "return bool(seen)",
        "an activation of two tensors is made again in backward, with a copy of both in memory",
        ("tests/layers/linear/test_compile_saved.py", "-k", "wide_input"),
    ),
    (
        "tritonfp8/launch/plan.py",
        "if last >= uses[index][0])",
        "if last > uses[index][0])",
        "what an op of a chain writes lies where the op reads",
        ("tests/launch/test_plan.py", "tests/launch/test_chains.py"),
    ),
    (
        "tritonfp8/ops/passes/chains.py",
        "elif node.target not in _VIEWS or any(_step_of(x) in runs[-1] for x in node.all_input_nodes):",
        "elif False:",
        "a chain goes on behind an op of torch that reads its results",
        _PASSES,
    ),
    (
        "tritonfp8/launch/chains.py",
        'return not values.get("batch_invariant")',
        "return True",
        "a chain multiplies rows that a batch-invariant GEMM must copy first",
        ("tests/layers/linear/test_function.py", "-k", "batch_invariant"),
    ),
)
