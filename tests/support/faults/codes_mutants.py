"""The faults about what is made from codes: transposes, codes of MXFP4, weights that are rounded to it; as arguments
of ``Mutant``.
"""

_KERNELS = ("tests/kernels/cast/test_codes.py",)
_LAYERS = ("tests/layers/test_transposes.py",)

_SENT = ("tests/distributed/test_codes.py", "-k", "bits_of_one_process")
_SOURCE = "tritonfp8/layers/linear/weight_source.py"
_ROUNDED = ("tests/layers/test_rounded_weights.py",)
_EXPERTS = ("tests/distributed/expert_parallel/test_experts.py", "-k", "as_they_arrive")
_PACKED = ("tests/kernels/cast/test_packed.py",)
_PACKED_GEMM = ("tests/kernels/test_packed_matmul.py",)
_READ = ("tests/clients/models/test_mxfp4_checkpoints.py",)

FAULTS = (
    (
        "kernels/cast/codes.py",
        "enc = tl.div_rn(tl.full(factors.shape, 1.0, tl.float32), factors)",
        "enc = tl.div_rn(tl.full(factors.shape, 2.0, tl.float32), factors)",
        "codes that are made again are shifted by one binade",
        _KERNELS,
    ),
    (
        "kernels/cast/codes.py",
        "    scale = spread(scale, R) if ENCODING.ROWS == 1 else scale\n",
        "",
        "codes are moved by the scale of another block",
        _KERNELS,
    ),
    (
        "kernels/cast/codes.py",
        "return spread_scale(q.to(tl.float32), factors,",
        "return spread_scale(q.to(tl.float32).to(tl.bfloat16), factors.to(tl.float16).to(tl.float32),",
        "a small scale is rounded before a code is moved",
        _KERNELS,
    ),
    (
        "kernels/numerics.py",
        "((bits >> 16) | ((bits & 0xFFFF) != 0).to(tl.int32))",
        "(bits >> 16)",
        "a column of the smallest values is taken for zeros",
        _KERNELS,
    ),
    (
        "kernels/cast/codes.py",
        "mask=mask, other=127 if ENCODING.E8M0 else 1.0)",
        "mask=mask, other=0)",
        "what lies beyond the edge makes a block NaN",
        _KERNELS,
    ),
    (
        "kernels/numerics.py",
        "return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
        "return tl.where(a > b, a, b)",
        "a NaN among codes is dropped",
        _KERNELS,
    ),
    (
        "tritonfp8/reference/casts.py",
        "return quantize(dequantize(qdata, scale, spec, torch.float32), spec_t, True, amax)",
        "return quantize(dequantize(qdata, scale, spec, torch.bfloat16), spec_t, True, amax)",
        "a subnormal value is rounded twice",
        ("tests/reference/test_codes.py",),
    ),
    (
        "tritonfp8/layers/linear/function.py",
        'how = Later(spec_t, saved.weight_amax_t, plan.recipe.codes["weight"], saved.weight_scale)',
        "how = Later(spec_t, saved.weight_amax_t)",
        "a weight that is cast again is transposed from its values",
        _LAYERS,
    ),
    (
        "tritonfp8/layers/linear/function.py",
        'specs = Specs(spec, spec_t, recipe.codes["grad_output"])',
        "specs = Specs(spec, spec_t)",
        "the transpose of a gradient is made from its values",
        _LAYERS,
    ),
    (
        "tritonfp8/distributed/tensor_parallel/sharded_operands.py",
        "        return own_sum(unalign(self.scattered_n, unalign(self.scatter.target, out, 0), 1), self.scatter)",
        "        return out[: self.scatter.sources[self.scatter.rank].local_size]",
        "a scattered output is not summed over the ranks",
        _SENT,
    ),
    (
        "tritonfp8/distributed/tensor_parallel/sharded_operands.py",
        "            return quantize_and_gather(x, specs, self.scatter, self.scattered_n)\n        return quantize",
        "            pass\n        return quantize",
        "each rank multiplies the gradient of its own tokens only",
        _SENT,
    ),
    (
        "tritonfp8/distributed/expert_parallel/all_to_all.py",
        "(_ordered(all_to_all_rows(part, send, receive, group), order) for part in parts)",
        "(_ordered(all_to_all_rows(part, send, receive, group), None) for part in parts)",
        "codes of tokens go to another expert",
        _EXPERTS,
    ),
    (
        "tritonfp8/layers/moe/routed_linear.py",
        "rows = rows._replace(picked=rows.picked[: travel.rows], factors=factors)",
        "rows = rows._replace(picked=rows.picked[: travel.rows], factors=None)",
        "gradients travel without the weights of their experts",
        _EXPERTS,
    ),
    (
        "tritonfp8/layers/stored/base.py",
        "return ops.transpose_codes(*self._as_operand(), *self.spec.args, *spec.args)",
        "return ops.transpose_codes(self._as_operand()[0], self._as_operand()[1].mul(2), *self.spec.args, *spec.args)",
        "stored codes are transposed by twice their scale",
        ("tests/layers/stored/test_stored.py",),
    ),
    (
        "kernels/cast/packed.py",
        "return (low | (high << 4)).to(tl.uint8)",
        "return (high | (low << 4)).to(tl.uint8)",
        "the element with the even index has the high bits",
        _PACKED,
    ),
    (
        "kernels/cast/packed.py",
        "exponent = tl.maximum(magnitude >> 23, EMIN + 127)",
        "exponent = magnitude >> 23",
        "a value below the smallest normal number is rounded by its own binade",
        _PACKED,
    ),
    (
        "kernels/cast/packed.py",
        "tl.where(largest < INFINITY_BITS, rounded, 0)",
        "rounded",
        "values of a row with a NaN count as rounded",
        _PACKED,
    ),
    (
        "kernels/cast/packed.py",
        "rounded += tl.sum",
        "rounded = tl.sum",
        "values that e4m3 does not hold are counted in the last columns of a long row only",
        _PACKED,
    ),
    (
        "kernels/cast/packed.py",
        "tl.where(found == 0, 0, bits)",
        "bits",
        "a block of zeros counts as half of its scale",
        _PACKED_GEMM,
    ),
    (
        "kernels/cast/packed.py",
        "(is_normal | 0x06060606)",
        "0x07070707",
        "the smallest magnitude of a block becomes 0.75 of its scale",
        _PACKED,
    ),
    (
        "tritonfp8/tuning/packed_tiles.py",
        "if m <= size)",
        "if m <= 2 * size)",
        "a tile has fewer tokens than the GEMM whose only tile of tokens it should be",
        _PACKED_GEMM,
    ),
    (
        "tritonfp8/reference/casts.py",
        "steps = torch.ldexp(magnitude, fmt.mantissa_bits - exponent).round()",
        "steps = torch.ldexp(magnitude, fmt.mantissa_bits - exponent).add(0.5).floor()",
        "a value between two codes of e2m1 goes away from zero, not to the even code",
        ("tests/reference/test_packed.py",),
    ),
    (
        "tritonfp8/layers/stored/base.py",
        "return int((rounded > 0).sum())",
        "return 0",
        "rows of MXFP4 that a scale a row rounds are not reported",
        ("tests/layers/stored/test_mxfp4.py",),
    ),
    (
        "tritonfp8/layers/stored/direct.py",
        "    if _is_packed(part):\n        _counts.is_stepping = False\n",
        "    if False:\n        _counts.is_stepping = False\n",
        "an optimizer begins a step of weights in MXFP4",
        ("tests/layers/stored/test_mxfp4.py",),
    ),
    (
        "tritonfp8/export/reading.py",
        "if target.is_meta and not target.requires_grad and expands_to(spec, part.spec):",
        "if target.is_meta and expands_to(spec, part.spec):",
        "weights that train keep codes that take no step",
        ("tests/clients/models/test_mxfp4_checkpoints.py", "-k", "compressed_tensors_trains"),
    ),
    (
        "tritonfp8/export/writing/as_loaded.py",
        "            weight = plain_weight(value_of(weight)).mT.contiguous()\n",
        "            weight = plain_weight(value_of(weight)).mT.contiguous() * 1.1\n",
        "trained experts come out with other values",
        ("tests/clients/models/test_mxfp4_checkpoints.py", "-k", "gpt_oss_trains"),
    ),
    (
        "tritonfp8/export/reading.py",
        "if target.is_meta and not target.requires_grad and expands_to(spec, part.spec):",
        "if target.is_meta and False:",
        "the codes of an MXFP4 checkpoint become codes of 8 bits",
        _READ,
    ),
    (
        "tritonfp8/export/reading.py",
        "values = values.mT if job.is_transposed else values",
        "values = values.mT.contiguous().view(values.shape).mT if job.is_transposed else values",
        "the weights of gpt-oss are read in the order of their codes",
        _READ,
    ),
    (
        _SOURCE,
        "return self.source.now(self.values(weight), specs)",
        "return self.source.now(weight, specs)",
        "forward multiplies a weight that is not rounded",
        _ROUNDED,
    ),
    (
        _SOURCE,
        "return self.source.later(values, how, grad_output)",
        "return self.source.later(weight, how, grad_output)",
        "the transposed weight is made from values that are not rounded",
        _ROUNDED,
    ),
    (
        _SOURCE,
        "return self.source.both(self.values(weight), specs)",
        "return self.source.both(weight, specs)",
        "a weight that is quantized once is not rounded",
        _ROUNDED,
    ),
    (
        "tritonfp8/layers/moe/grouped.py",
        "            weight = self.source.values(weight)\n",
        "",
        "gradients of experts in high precision read weights that are not rounded",
        _ROUNDED,
    ),
    (
        "tritonfp8/distributed/fsdp/gather_plan.py",
        "rounded(shard.mT, self.weights).mT if flipped else rounded(shard, self.weights)",
        "shard",
        "FSDP2 sends codes of a weight that is not rounded",
        ("tests/distributed/fsdp/test_fsdp.py", "-k", "mxfp4_weights and equal_those_without"),
    ),
    (
        "tritonfp8/distributed/tensor_parallel/linear.py",
        "return sealed(rounded(x, spec, amax), x)",
        "return sealed(rounded(x, spec), x)",
        "each rank rounds its part of a block by itself",
        ("tests/distributed/test_parallelism.py", "-k", "test_rowwise and mxfp4_weights"),
    ),
    (
        "tritonfp8/rollout/sharing.py",
        "spec, read = layer.recipe.storage, layer.recipe.output.rhs",
        "spec = read = layer.recipe.output.rhs",
        "a rollout reads codes of weights that were not rounded",
        ("tests/rollout/test_generator.py", "-k", "after_each_step and mxfp4_weights"),
    ),
)
