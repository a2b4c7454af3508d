"""The faults about what others do with weights that are stored in 8 bits, as arguments of ``Mutant``."""

_DIRECT = "tritonfp8/layers/stored/direct.py"
_UPDATE = "tritonfp8/layers/stored/update.py"
_BASE = "tritonfp8/layers/stored/base.py"
_WRITES = "tests/layers/stored/test_writes.py"
_READS = "tests/layers/stored/test_reads.py"
_ADAPTERS = "tests/clients/models/test_adapters.py"
_MASTERS = "tests/optim/test_masters.py"
_PARAMETER = "tests/layers/stored/test_as_parameter.py"

FAULTS = (
    (
        _DIRECT,
        "            group[_STEPS] = group.get(_STEPS, 0) + 1\n",
        "            pass\n",
        "SGD rounds each step by the same random bits",
        (_MASTERS, "-k", "bits_of_its_own"),
    ),
    (
        _DIRECT,
        "setattr(part._qdata, STEP, StepOfWeight(number, position))",
        "pass",
        "the codes that an optimizer of torch gives depend on the mesh, and on when a run was stopped",
        (_MASTERS, "-k", "resumed_run"),
    ),
    (
        _DIRECT,
        "        refuse_merging(_base(x))\n",
        "",
        "peft merges adapters into the codes of a frozen base through a view",
        (_ADAPTERS, "-k", "merges and SUPERTUNING"),
    ),
    (
        "tritonfp8/layers/stored/weight.py",
        "                refuse_merging(first)\n",
        "",
        "peft merges adapters into the codes of a frozen base by a copy",
        (_ADAPTERS, "-k", "merges and OFT"),
    ),
    (
        "tritonfp8/layers/stored/weight.py",
        "        refuse_merging(self)\n",
        "",
        "peft merges adapters into the codes of a frozen base by new data",
        (_ADAPTERS, "-k", "merges and IA3"),
    ),
    (
        "tritonfp8/layers/stored/rows.py",
        "exponents = exponents.repeat_interleave(rows, 0)[: qdata.shape[0]]",
        "exponents = exponents.repeat_interleave(rows, 0).roll(1, 0)[: qdata.shape[0]]",
        "the first row of each block of a stored weight has the scale of the block before",
        ("tests/layers/stored/test_rows.py",),
    ),
    (
        "tritonfp8/distributed/tensor_parallel/sharded_operands.py",
        "return pair, global_amax(_values(weight), None, spec_t, layouts)[1]",
        "return pair, None",
        "each rank scales the transpose of its part of a stored weight by itself",
        ("tests/distributed/fsdp/test_stored.py", "-k", "tensor_parallel and rowwise"),
    ),
    (
        _UPDATE,
        "ops.adamw(*tensors, keys, *layout(part), at_random, None, None, amax)",
        "ops.adamw(*tensors, keys, *layout(part), False, None, None, amax)",
        "small writes to a stored weight are rounded to nearest, and most of an average is lost",
        (_WRITES, "-k", "add_up"),
    ),
    (
        _DIRECT,
        "if func in OVERWRITES and not _counts.is_stepping:",
        "if not _counts.is_stepping:",
        "a write by a view is rounded to nearest",
        (_WRITES, "-k", "add_up"),
    ),
    (
        _UPDATE,
        "    setattr(codes, _CALLS, calls + 1)\n",
        "",
        "a write that changed no code draws the same random bits at each repeat",
        (_WRITES, "-k", "lost_once"),
    ),
    (
        _UPDATE,
        "part.qdata.view(torch.uint8).sum(dtype=torch.int64)[None] + place",
        "torch.randint(1 << 30, (1,), device=codes.device) + place",
        "replicas that write alike get other codes",
        (_WRITES, "-k", "replicas"),
    ),
    (
        _DIRECT,
        "        self.writes += 1\n        before",
        "        before",
        "a write outside of an optimizer is not counted",
        (_WRITES, "-k", "counted"),
    ),
    (
        _DIRECT,
        "values = _Values(narrow and all(x.dtype == _base(x).dtype for x in targets))",
        "values = _Values(False)",
        "a small write to a bfloat16 weight is lost in bfloat16 before it is rounded to a code",
        (_WRITES, "-k", "every_recipe"),
    ),
    (
        _BASE,
        "if self.requires_grad and torch.is_grad_enabled():",
        "if False:",
        "dequantize() of a trained weight has no gradient, and a penalty trains nothing",
        (_READS, "-k", "penalty or dequantize"),
    ),
    (
        "tritonfp8/layers/stored/replace.py",
        "        layer.on_move = _moving\n",
        "",
        "a move while a graph is alive leaves a model half moved",
        (_PARAMETER, "-k", "graph_is_alive"),
    ),
)
