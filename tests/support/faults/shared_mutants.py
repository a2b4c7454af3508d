"""The faults about what layers, and ranks, share, as arguments of ``Mutant``."""

FAULTS = (
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
