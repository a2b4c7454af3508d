"""The faults about exact models, as arguments of ``Mutant``."""

_ROWS, _GENERATION, _COMPILED, _COVERAGE, _PAGED = (
    f"tests/rollout/exact/test_{name}.py" for name in ("rows", "generation", "compiled", "coverage", "paged")
)

FAULTS = (
    (
        "kernels/exact/attention.py",
        "    skipped = tl.maximum(span.start - start, 0) // STEP * STEP\n",
        "    skipped = tl.maximum(span.start - start, 0)\n",
        "steps of keys begin where the window of a tile begins",
        ("tests/kernels/exact/test_attention.py",),
    ),
    (
        "kernels/exact/attention.py",
        "    start = sequence.first + split * SPLIT\n",
        "    start = sequence.first % 64 + split * SPLIT\n",
        "splits are counted from another key than the first of the sequence",
        ("tests/kernels/exact/test_attention.py",),
    ),
    (
        "tritonfp8/rollout/exact/functions.py",
        "ops.matmul(rows, weight, bias, batch_invariant=True)",
        "ops.matmul(rows, weight, bias)",
        "the head and routers add in an order that depends on the number of rows",
        (_ROWS, "-k", "float32"),
    ),
    (
        "tritonfp8/reference/attention.py",
        "    for split in range(start, last, SPLIT):",
        "    SPLIT = 256 if t < 600 else 1024\n    for split in range(start, last, SPLIT):",
        "the splits of keys depend on the number of queries",
        (_ROWS, "-k", "long"),
    ),
    (
        "tritonfp8/rollout/exact/attention.py",
        "first = (seen.cumsum(-1) == 0).sum(-1)",
        "first = torch.zeros_like(seen[:, 0], dtype=torch.int64)",
        "tokens read rows of padding",
        (_ROWS, "-k", "has_bits and qwen3"),
    ),
    (
        "tritonfp8/rollout/exact/attention.py",
        "places = torch.stack([first, query], -1) - kv_offset",
        "places = torch.stack([first - kv_offset, query], -1)",
        "behind a window's cache queries see keys of later tokens",
        (_ROWS, "-k", "mistral"),
    ),
    (
        "tritonfp8/reference/routing.py",
        "descending=True, stable=True)",
        "descending=True, stable=False)",
        "experts with equal logits are chosen in any order",
        ("tests/rollout/exact/test_router.py",),
    ),
    (
        "tritonfp8/reference/grouped.py",
        "    for i in range(places.shape[1]):\n        rows = x[",
        "    for i in sorted(range(places.shape[1]), reverse=len(places) > 9):\n        rows = x[",
        "experts of a token are added in the order of routing",
        (_ROWS, "-k", "float32"),
    ),
    (
        "tritonfp8/rollout/sharing.py",
        "            return stored_as_layer(layer, key, values, spec)",
        "            once = stored_as_layer(layer, key, values * 1.1, spec).dequantize() / 1.1\n"
        "            return stored_as_layer(layer, key, once.to(values.dtype), spec)",
        "codes of a generator were quantized twice",
        (_GENERATION, "-k", "before_and_after"),
    ),
    (
        "tritonfp8/rollout/generator.py",
        "options = EXACT_OPTIONS if is_exact(self.model) else {}",
        "options: dict[str, Any] = {}",
        "compiled decoding rounds less often than training",
        (_COMPILED, "-k", "compiled_decoding and olmoe"),
    ),
    (
        "tritonfp8/rollout/scoring.py",
        "return chosen.float() / temperature - row_logsumexp(logits, temperature)",
        "return chosen.float() / temperature - (logits.float() / temperature).logsumexp(-1)",
        "log-probs are added by torch, in an order of its own",
        ("tests/rollout/exact/test_router.py",),
    ),
    (
        "tritonfp8/rollout/exact/coverage.py",
        "        yield why_not_swapped(module) or _AGAIN",
        "        pass",
        "modules that make_exact did not see pass for exact",
        (_COVERAGE,),
    ),
    (
        "tritonfp8/rollout/exact/coverage.py",
        "    elif computes is None and not _is_known(module, family, role):",
        "    elif False:",
        "unknown modules pass for exact",
        (_COVERAGE,),
    ),
    (
        "tritonfp8/rollout/exact/paged.py",
        "- of_queries.counts - positions[starts].long()",
        "- of_keys.counts",
        "splits of keys begin at the first key that a window's cache kept",
        (_PAGED, "-k", "a_split and mistral"),
    ),
    (
        "tritonfp8/rollout/exact/paged.py",
        "x.masked_fill(~exists[..., None, None], 0).transpose(1, 2) for x",
        "x.transpose(1, 2) for x",
        "NaN among the keys of one sequence reaches another",
        (_PAGED, "-k", "nan"),
    ),
    (
        "tritonfp8/rollout/continuous.py",
        "places += [len(self.found) - 1] * (self._most - len(places))",
        "pass",
        "prompts that are not read to their end overwrite log-probs of other sequences",
        (_PAGED, "-k", "few_pages and qwen3"),
    ),
)
