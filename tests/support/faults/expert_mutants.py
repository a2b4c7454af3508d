"""The faults about experts, as arguments of ``Mutant``."""

_GROUPED = ("tests/reference/test_grouped.py",)
_LINEAR = ("tests/layers/moe/test_grouped_linear.py",)
_EXPERTS = ("tests/layers/moe/test_experts.py",)
_STORED = ("tests/layers/stored/test_matrices.py", "tests/layers/stored/test_stored.py")
_EXPORT = ("tests/export/test_experts.py",)
_RANKS = ("tests/distributed/expert_parallel/test_experts.py",)

_CASTS = ("tests/kernels/moe/test_grouped_casts.py",)
_GEMMS = ("tests/kernels/moe/test_grouped_matmul.py",)

FAULTS = (
    (
        "tritonfp8/launch/gemms/by_torch.py",
        ".clamp(0, a.shape[1]).cummax(0).values",
        ".clamp(0, a.shape[1])",
        "torch's grouped GEMM gets ends that decrease",
        ("tests/kernels/moe/test_by_torch.py",),
    ),
    (
        "tritonfp8/launch/gemms/by_torch.py",
        "View.of(x).t().has_tma_layout() for x in (a, b)",
        "View.of(x).t().has_tma_layout() for x in (a,)",
        "torch's grouped GEMM gets an operand that it does not take",
        ("tests/kernels/moe/test_by_torch.py",),
    ),
    (
        "kernels/group_table.py",
        "starts // TILE + index, last)",
        "starts // TILE, last)",
        "columns of two groups overlap",
        _CASTS,
    ),
    (
        "kernels/cast/groups.py",
        "        offsets = (start + within).to(tl.int64)[:, None] * stride_qm",
        "        offsets = within.to(tl.int64)[:, None] * stride_qm",
        "zeros of rows of no group overwrite the first rows",
        _CASTS,
    ),
    (
        "kernels/cast/group_rows.py",
        "        return (x.to(tl.float32) * factors[:, None]).to(x.dtype)",
        "        return (x.to(tl.float32) * factors[:, None])",
        "rows are not rounded after they are multiplied by their factors",
        _CASTS,
    ),
    (
        "kernels/cast/group_rows.py",
        "    silu = (x * logistic(x)).to(gate.dtype)",
        "    silu = x * logistic(x)",
        "the SiLU of experts is not rounded before it is multiplied",
        ("tests/kernels/moe/test_rows.py",),
    ),
    (
        "kernels/cast/groups.py",
        "                value = value.to(x.dtype).to(tl.float32)",
        "                value = value.to(tl.float32)",
        "products of the rows of a token and their weights are not rounded",
        ("tests/kernels/moe/test_rows.py",),
    ),
    (
        "kernels/cast/groups.py",
        "_raise_maxima(highest_up, col_ptr + F,",
        "_raise_maxima(highest, col_ptr + F,",
        "the gradient of up is scaled by the amax of that of the gate",
        ("tests/kernels/moe/test_rows.py",),
    ),
    (
        "kernels/gemm/grouped.py",
        "        acc = tl.where(is_group & (end > start), acc, 0.0)",
        "        acc = acc",
        "rows of no group get a bias",
        _GEMMS,
    ),
    (
        "kernels/gemm/grouped.py",
        "                first = (start // ALIGNMENT + group) * ALIGNMENT",
        "                first = (start // ALIGNMENT) * ALIGNMENT",
        "groups of columns are read from where another begins",
        _GEMMS,
    ),
    (
        "tritonfp8/layers/moe/routed_linear.py",
        "top_k_weights.reshape(-1)[order])",
        "top_k_weights.reshape(-1))",
        "gradients are multiplied by the weights of other experts",
        _EXPERTS,
    ),
    (
        "tritonfp8/reference/grouped.py",
        "bounds.append((start, min(max(end, start), tokens)))",
        "bounds.append((start, max(end, start)))",
        "offsets beyond the tokens are followed",
        _GROUPED,
    ),
    (
        "tritonfp8/specs/quant_spec.py",
        "return GROUP_ALIGNMENT * (start // GROUP_ALIGNMENT + group)",
        "return GROUP_ALIGNMENT * (start // GROUP_ALIGNMENT) + group",
        "columns of two groups share a block",
        _GROUPED,
    ),
    (
        "tritonfp8/layers/moe/grouped.py",
        "self.recipe.grad_weight.lhs if self.needs_grad_weight else None",
        "self.recipe.grad_input.lhs if self.needs_grad_weight else None",
        "grad_weight reads gradients that were quantized for grad_input",
        _LINEAR,
    ),
    (
        "tritonfp8/layers/moe/routing.py",
        "torch.arange(experts, dtype=ids.dtype, device=ids.device), right=True)",
        "torch.arange(experts, dtype=ids.dtype, device=ids.device), right=False)",
        "tokens go to the expert after theirs",
        _EXPERTS,
    ),
    (
        "tritonfp8/layers/moe/experts.py",
        "w.transpose(1, 2) for name, w in found.items()} if self.is_transposed",
        "w for name, w in found.items()} if self.is_transposed",
        "transposed weights of gpt-oss are read as they lie",
        _EXPERTS,
    ),
    (
        "tritonfp8/distributed/expert_parallel/all_to_all.py",
        "grad = grad if ctx.by == 1 else grad / ctx.by",
        "grad = grad",
        "gradients of experts are sums over ranks where those of other layers are means",
        (*_RANKS, "-k", "averaged"),
    ),
    (
        "tritonfp8/distributed/expert_parallel/all_to_all.py",
        'scale_rounding == "pow2"',
        'scale_rounding != ""',
        "rows are sent in 8 bits where that changes bits of outputs",
        (*_RANKS, "-k", "payload"),
    ),
    (
        "tritonfp8/distributed/expert_parallel/dispatch.py",
        "rows = rows + sum(x.sum() for x in (*weights, *biases) if x is not None and x.requires_grad)",
        "rows = rows + 0",
        "empty shards get no gradient, and other ranks wait for it",
        (*_RANKS, "-k", "divide"),
    ),
    (
        "tritonfp8/layers/stored/replace.py",
        "for key in names_of_weights(layer):",
        "for key in names_of_weights(layer)[:1]:",
        "the second weight of experts stays in high precision",
        _STORED,
    ),
    (
        "tritonfp8/export/experts.py",
        "scale = weight._scale[part.expert, part.start // rows : -(-part.stop // rows)].contiguous()",
        "scale = weight._scale[part.expert, : (part.stop - part.start) // rows].contiguous()",
        "up_proj is written with the scales of gate_proj",
        _EXPORT,
    ),
    (
        "tritonfp8/export/experts.py",
        "for at, name in enumerate(names)",
        "for at, name in enumerate(names[::-1])",
        "gate_proj and up_proj are exchanged, written and read",
        _EXPORT,
    ),
    (
        "tritonfp8/export/reading.py",
        "return _are_powers(scale) and replace(",
        "return replace(",
        "scales that are no powers of two become those of a stored weight",
        _EXPORT,
    ),
    (
        "tritonfp8/compat/transformers_names.py",
        "return written if loaded == [(name, pattern) for pattern in converter.source_patterns] else ()",
        "return written[::-1] if loaded == [(name, pattern) for pattern in converter.source_patterns] else ()",
        "w1 and w3 of Mixtral are exchanged",
        ("tests/compat/test_transformers_names.py",),
    ),
    (
        "tritonfp8/launch/gemms/grouped.py",
        'return "dequantized" if kind == "emulated" and is_widened else kind',
        "return kind",
        "grouped GEMMs of dequantized operands are counted as emulated",
        ("tests/kernels/moe/test_grouped_matmul.py", "-k", "is_known"),
    ),
    (
        "tritonfp8/warmup/measure.py",
        "return [settled.get(i, math.inf) for i in range(len(seconds))]",
        "return seconds",
        "long GEMMs are tuned at the clocks of a GPU that rests",
        ("tests/warmup/test_measure.py", "-k", "settled"),
    ),
    (
        "tritonfp8/launch/casts/groups.py",
        "starts = itertools.accumulate(sizes.values(), initial=0)",
        "starts = itertools.repeat(0)",
        "groups read the amaxes of rows as those of their columns",
        ("tests/kernels/moe/test_rows.py", "-k", "gradient"),
    ),
    (
        "tritonfp8/tuning/matmul_space.py",
        "paid_k = waves * max(k, 1) + (1 if config.pingpong else waves) * config.idle_steps * config.block_k",
        "paid_k = waves * max(k, 1)",
        "the ends of a tile cost nothing, so that small K are multiplied as large ones",
        ("tests/tuning/test_choose.py",),
    ),
    (
        "tritonfp8/launch/casts/groups.py",
        "    given = of.amax is not None\n    if not given:\n",
        "    given = False\n    if of.amax is None:\n",
        "the sign of an amax that a caller gives for a matrix counts",
        ("tests/kernels/moe/test_grouped_casts.py", "-k", "caller"),
    ),
    (
        "tritonfp8/layers/moe/grouped.py",
        "how = Later(gemm.rhs, amax_t, spec, scale)",
        "how = Later(gemm.rhs, None if amax_t is None else amax_t[:1].expand_as(amax_t), spec, scale)",
        "all experts are scaled for backward by the amaxes of the first one",
        _LINEAR,
    ),
)
