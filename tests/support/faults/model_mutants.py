"""The faults about models of other libraries, and what layers and ranks share, as arguments of ``Mutant``."""

_LOADERS = ("tests/clients/models/test_loaders.py", "-k", "TestTransformers or TestAccelerate")
_MADE = ("tests/layers/stored/test_quantized_init.py",)

FAULTS = (
    (
        "tritonfp8/layers/stored/replace.py",
        "return replacing(parameter, stored_as_layer(",
        "return replacing(before, stored_as_layer(",
        "a stored weight loses the mark of a loader, which then initializes it again",
        _LOADERS,
    ),
    (
        "tritonfp8/layers/stored/base.py",
        "own = nn.Parameter(before.detach(), False).__dict__.keys() | found.__dict__.keys()",
        "own = found.__dict__.keys()",
        "a plain weight keeps the codes of the stored one that it replaces",
        _MADE,
    ),
    (
        "tritonfp8/layers/stored/base.py",
        "return nn.Parameter(before.of_values(x), requires_grad)",
        "return nn.Parameter(x, requires_grad)",
        "accelerate puts plain weights in the place of stored ones",
        _MADE,
    ),
    (
        "tritonfp8/conversion/selection/roles.py",
        "        if layer in self.told:\n",
        "        if None in self.told:\n",
        "what a model tells of its heads is not read",
        ("tests/conversion/test_heads.py",),
    ),
    (
        "tritonfp8/conversion/selection/heads.py",
        "if source is None or any(_matches(source, name) for name in embeddings):",
        "if source is None:",
        "a head that is tied by name is converted",
        ("tests/conversion/test_heads.py",),
    ),
    (
        "tritonfp8/conversion/selection/heads.py",
        "return last_linears(wrapped)",
        "pass",
        "the adapter beside a head is taken for the head",
        ("tests/conversion/test_heads.py",),
    ),
    (
        "tritonfp8/conversion/selection/roles.py",
        "    part = named or of_norm\n",
        "    part = named\n",
        "layers that compute the scale and shift of a norm are converted",
        ("tests/conversion/test_roles.py", "-k", "TestConditioning"),
    ),
    (
        "tritonfp8/conversion/selection/roles.py",
        "return next((each is parent for each in around if _is_model_of_diffusers(each)), False)",
        "return _is_model_of_diffusers(parent)",
        "the last layers of transformers inside of a UNet are taken for output heads",
        ("tests/conversion/test_heads.py",),
    ),
    (
        "tritonfp8/conversion/stored_init.py",
        "self.parents[parent] = [of_load,",
        "of_load.remove()\n            self.parents[parent] = [of_load,",
        "a checkpoint is read before heads are known, and their values are rounded",
        (_LOADERS[0], "-k", "counts_before"),
    ),
    (
        "tritonfp8/conversion/stored_init.py",
        "    _settle_open()\n    for block in _open:",
        "    for block in _open:",
        "a loader that assigns Parameters rounds the heads that only the whole model shows",
        (_LOADERS[0], "-k", "counts_before"),
    ),
    (
        "tritonfp8/layers/linear/input_cache.py",
        "not _are_equal(pairs, provider.input(rows, specs))",
        "not _are_equal(pairs, pairs)",
        "verify does not see that a layer read the cast of values that were overwritten by a write that torch ignores",
        ("tests/workflow/test_verify_failures.py", "-k", "between_siblings"),
    ),
    (
        "tritonfp8/distributed/fsdp/all_gather.py",
        "changed = self._released\n",
        "changed = False\n",
        "a rank that reverted its layers alone meets other collectives of the others",
        ("tests/distributed/test_disagreement.py", "-k", "alone and reverted"),
    ),
    (
        "tritonfp8/layers/stored/shard.py",
        "size = max(-(-total // mesh.size()), self.shape[0])",
        "size = -(-total // mesh.size())",
        "a stored weight that each rank has all of is taken for a shard",
        ("tests/distributed/test_parallelism.py", "-k", "replicate_of_torch"),
    ),
)
