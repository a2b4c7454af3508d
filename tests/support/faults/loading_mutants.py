"""The faults about codes that are taken for values, as arguments of ``Mutant``."""

_CODES = ("tests/layers/test_codes.py",)
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
        "prepared = list(_prepared(matched.jobs, given.__getitem__, torch.device(device)))",
        "prepared = _prepared(matched.jobs, given.__getitem__, torch.device(device))",
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
)
