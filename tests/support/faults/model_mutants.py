"""The faults about models of other libraries, what layers and ranks share, and gradients that ranks add; as arguments
of ``Mutant``.
"""

_LOADERS = ("tests/clients/models/test_loaders.py", "-k", "TestTransformers or TestAccelerate")
_PARTS = ("tests/kernels/optim/test_gradients.py",)
_REDUCED = ("tests/distributed/gradients/test_reduce_scatter.py",)
_ORDERED = ("tests/distributed/gradients/test_ordered.py", "-k", "not any_number")
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
    (
        "kernels/optim/gradients.py",
        "    return 1 << ((count - 1).bit_length() - 1)",
        "    return 1",
        "parts are added from the last to the first",
        _PARTS,
    ),
    (
        "tritonfp8/reference/shards.py",
        "sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=False)] + last",
        "sums = [sums[0] + sums[1], *sums[2:]]",
        "parts are added from the first to the last",
        _PARTS,
    ),
    (
        "tritonfp8/launch/gradients.py",
        "MOST_PARTS = 32",
        "MOST_PARTS = 24",
        "sums of several launches are no nodes of the tree",
        _PARTS,
    ),
    (
        "kernels/optim/gradients.py",
        "exponents = tl.load(from_ + tile.groups, mask",
        "exponents = tl.load(from_ + tl.maximum(tile.groups - 1, 0), mask",
        "a group is read by the scale of the group before",
        _PARTS,
    ),
    (
        "kernels/optim/gradients.py",
        "place = hash32(hash32(tl.zeros((1, 1), tl.uint32) + rank.to(tl.uint32)) ^ index)",
        "place = hash32(hash32(tl.zeros((1, 1), tl.uint32)) ^ index)",
        "ranks round by the same random bits",
        _PARTS,
    ),
    (
        "tritonfp8/reference/shards.py",
        "torch.full_like(index, rank)",
        "torch.full_like(index, 0)",
        "ranks with equal gradients round alike, and the errors add up",
        _PARTS,
    ),
    (
        "tritonfp8/reference/shards.py",
        "optimizer.round_to_code(values * enc, fmt, bits)",
        "optimizer.round_to_code(values * enc, fmt, None)",
        "gradients are rounded to the nearest code, which has a bias",
        _PARTS,
    ),
    (
        "tritonfp8/distributed/gradients/reduce_scatter.py",
        "group.size(), group.rank())",
        "group.size(), 0)",
        "each rank rounds as the first one",
        _REDUCED,
    ),
    (
        "tritonfp8/distributed/gradients/reduce_scatter.py",
        "        return 1.0 / ranks\n",
        "        return 1.0\n",
        "a mean of ranks is their sum",
        _REDUCED,
    ),
    (
        "tritonfp8/distributed/gradients/reduce_scatter.py",
        "        return float(state[1])",
        "        return 1.0",
        "the divide factor of FSDP2 is forgotten",
        _REDUCED,
    ),
    (
        "tritonfp8/distributed/gradients/ordered.py",
        "        while (first := self._levels[level]) is not None:\n"
        "            self._levels[level] = None\n"
        "            grads = _joined(first, grads)\n"
        "            level += 1\n",
        "        while level < len(self._levels) - 1:\n"
        "            if (first := self._levels[-1]) is not None:\n"
        "                grads = _joined(first, grads)\n"
        "            level = len(self._levels) - 1\n",
        "units are added from the first to the last",
        _ORDERED,
    ),
    (
        "tritonfp8/distributed/gradients/ordered.py",
        "            module.set_gradient_divide_factor(1.0)\n",
        "            pass\n",
        "gradients are divided by the number of ranks",
        _ORDERED,
    ),
    (
        "tritonfp8/distributed/gradients/norm.py",
        "total = (scaled * scaled * 2.0**_BITS).long().sum(1).double()",
        "total = (scaled * scaled).sum(1).double() * 2.0**_BITS",
        "the sum of a row depends on how a device adds",
        _ORDERED,
    ),
    (
        "tritonfp8/distributed/gradients/norm.py",
        "by_rank = [part.split(list(counts)) for part, counts",
        "by_rank = [part.flip(0).split(list(counts)) for part, counts",
        "rows of a rank are gathered in another order",
        _ORDERED,
    ),
)
