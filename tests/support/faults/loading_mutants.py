"""The faults about codes that are taken for values, as arguments of ``Mutant``."""

_CODES = ("tests/layers/test_codes.py",)
_WRITING = "tritonfp8/export/writing/as_loaded.py"
_SAME_FORMAT = "tests/clients/models/test_same_format.py"
_AUTO_MODEL = "tests/clients/models/test_auto_model.py"
_PRETRAINED = "tests/clients/models/test_pretrained.py"

FAULTS = (
    (
        "tritonfp8/layers/codes.py",
        "x.dtype is not torch.bool",
        "x.dtype.is_floating_point",
        "codes in integers of one byte are taken for values",
        _CODES,
    ),
    (
        "tritonfp8/layers/parameter_hooks.py",
        "refuse_codes(prefix + key, found)",
        "pass",
        "load_state_dict copies codes into a weight",
        _CODES,
    ),
    (
        "tritonfp8/layers/codes.py",
        '"_scale" in key)',
        '"_scale_inv" in key)',
        "a scale beside a weight of bfloat16 is passed over, unless it is called weight_scale_inv",
        _CODES,
    ),
    (
        "tritonfp8/layers/parameter_hooks.py",
        'refuse_codes(f"the parameter {name}", param)',
        "pass",
        "a Parameter of codes takes the place of a weight",
        _CODES,
    ),
    (
        "tritonfp8/layers/stored/weight.py",
        "refuse_codes(STORED, values)",
        "pass",
        "a copy into a stored weight takes codes for values",
        _CODES,
    ),
    (
        "tritonfp8/layers/stored/direct.py",
        "refuse_codes(STORED, args[1])",
        "pass",
        "a copy into a view, or into several weights, takes codes for values",
        _CODES,
    ),
    (
        "tritonfp8/export/reading.py",
        "ready = list(prepared(matched.jobs, given.__getitem__, torch.device(device)))",
        "ready = prepared(matched.jobs, given.__getitem__, torch.device(device))",
        "a NaN in the last weight of a stream is found when the weights before it are new",
        ("tests/export/test_stream.py", "-k", "error"),
    ),
    (
        "tritonfp8/export/reading.py",
        "    with uninterrupted():\n        filled",
        "    if True:\n        filled",
        "Ctrl-C leaves some weights old and some new",
        ("tests/export/test_stream.py", "-k", "ctrl_c"),
    ),
    (
        "tritonfp8/export/reading.py",
        "_kept(job.place.tensor, source, x), source)",
        "x, source)",
        "codes of a stream become values, and these are quantized again",
        ("tests/export/test_stream.py", "tests/export/test_stored.py"),
    ),
    (
        "tritonfp8/integrations/pretrained.py",
        "        for name, rhs in read.items():",
        "        for name, rhs in ():",
        "a checkpoint is rounded again by a recipe with other blocks",
        (_PRETRAINED, "-k", "reads_the_codes and fine_grained and qwen3"),
    ),
    (
        "tritonfp8/integrations/pretrained.py",
        'model.to(device).requires_grad_(train == "full")',
        "model.to(device)",
        "a base trains beside its adapters",
        (_PRETRAINED, "-k", "reads_the_codes and fine_grained and qwen3"),
    ),
    (
        _WRITING,
        "            before = now.of_values(before)\n",
        "            pass\n",
        "codes that the load rounded again count as trained, and are written as they were rounded",
        (_SAME_FORMAT, "-k", "rounded_again and llama"),
    ),
    (
        _WRITING,
        'row = replace(row, spec=replace(row.spec, scale_rounding="pow2"))',
        "row = replace(row)",
        "codes of a trained weight are rounded a second time where a checkpoint is written in its own format",
        (_SAME_FORMAT, "-k", "rounded_once and llama"),
    ),
    (
        _WRITING,
        "if not torch.equal(_cut(now, job), _cut(before, job)):",
        "if not torch.equal(now, before):",
        "a trained expert has all experts of its layer written again",
        (_SAME_FORMAT, "-k", "one_expert"),
    ),
    (
        _WRITING,
        'if key.startswith("_") or key in _SET_BY_OTHERS or',
        "if",
        "the dtype that a model computes in gets into the config of its checkpoint",
        (_SAME_FORMAT, "-k", "to_the_bit and full"),
    ),
    (
        "tritonfp8/integrations/quantizer.py",
        "        vars(model).update(vars(found))\n",
        "        vars(model).update(vars(found.bfloat16()))\n",
        "AutoModel gives weights in another dtype than from_pretrained",
        (_AUTO_MODEL, "-k", "one_of_from_pretrained and full"),
    ),
    (
        "tritonfp8/export/matching.py",
        " or any(re.search(each, name) for each in extra)]",
        "]",
        "a checkpoint whose further layers transformers leaves out does not load",
        ("tests/clients/models/test_published.py", "-k", "V3"),
    ),
    (
        "tritonfp8/integrations/pretrained.py",
        "    _keep_in_float32(model)\n    if",
        "    if",
        "the biases by which tokens choose experts are rounded to bfloat16",
        ("tests/clients/models/test_published.py", "-k", "Kimi"),
    ),
    (
        "tritonfp8/export/matching.py",
        "            elif other in parts and id(parts[other].place) not in named:\n                parts[name]",
        "            elif False:\n                parts[name]",
        "experts whose names a loader renames have no place",
        ("tests/clients/models/test_published.py", "-k", "V4"),
    ),
)
