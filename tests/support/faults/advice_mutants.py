"""Faults of advice, and of ``filter="auto"``: a wrong recommendation looks like a right one."""

FAULTS = (
    (
        "tritonfp8/advice/measure.py",
        "seconds=max(host, gpu),",
        "seconds=gpu,",
        "a step that waits for the host is predicted by its kernels",
        ("tests/advice/test_advise.py", "-k", "left_out"),
    ),
    (
        "tritonfp8/advice/blocks.py",
        "        return len(self.names) - self.kept",
        "        return len(self.names)",
        "the blocks that the shorter model has count twice",
        ("tests/advice/test_blocks.py",),
    ),
    (
        "tritonfp8/advice/recommend.py",
        "if best.timing.seconds * LEAST_GAIN > bf16.timing.seconds:",
        "if best.timing.seconds * LEAST_GAIN > pair.timing.seconds:",
        "a recipe is recommended though bf16 is faster in another mode",
        ("tests/advice/test_recommend.py",),
    ),
    (
        "tritonfp8/advice/contenders.py",
        "key=len, reverse=True)",
        "key=len)",
        "a short pattern decides the layers of a longer one",
        ("tests/advice/test_recommend.py",),
    ),
    (
        "tritonfp8/conversion/selection/cost.py",
        " and not _among_ranks() else",
        " else",
        "each rank measures its host, and takes other layers",
        ("tests/conversion/test_filters.py", "-k", "Host"),
    ),
    (
        "tritonfp8/conversion/selection/cost.py",
        "    if max(quantized) <= max(plain):",
        "    if quantized[0] <= plain[0]:",
        '"auto" forgets the host',
        ("tests/conversion/test_filters.py", "-k", "Host"),
    ),
)
