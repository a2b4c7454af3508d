"""Sizes of folders, files, functions and rooms; and one meaning for each name of a class."""

import ast
from collections import Counter

MAX_FILES, MAX_FILE_LINES, MAX_FUNCTION_LINES = 12, 400, 60


def folder_violations(modules):
    """Folders of more files than one can keep in view, or that do not say what they are for."""
    violations = []
    files = Counter(module.folder for module in modules)
    packages = {module.name: module for module in modules if module.is_package}
    for folder, count in files.items():
        if count > MAX_FILES:
            violations.append(f"{folder} has {count} files, more than {MAX_FILES}")
        if folder in packages and not ast.get_docstring(packages[folder].tree):
            violations.append(f"{folder} has no docstring that says what it is for")
    return violations


def size_violations(modules):
    violations = []
    for module in modules:
        if (lines := len(module.source.splitlines())) > MAX_FILE_LINES:
            violations.append(f"{module.name} has {lines} lines")
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    violations.append(f"{module.name}:{node.lineno} {node.name} has {lines} lines")
    return violations


def _classes(body, outer=""):
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield outer + node.name
            yield from _classes(node.body, f"{outer}{node.name}.")


def class_name_violations(modules):
    """Classes of one name in several modules. A class inside of another one has that as part of its name."""
    places = {}
    for module in modules:
        for name in _classes(module.tree.body):
            places.setdefault(name, []).append(module.name)
    return [
        f"{name} is a class in {', '.join(found)}: give each a name of its own"
        for name, found in places.items()
        if len(found) > 1
    ]


# The most lines of a room; a number may fall, and rises with its reason beside it.
ROOM_LINES = {
    "kernels": 5830,  # transposes from codes, also of several weights and of groups; MXFP4 and experts in it; gradients
    "compat": 1470,  # what torch 2.11 does not tell of graphs, or leaves out of checkpoints; merging by peft; Ctrl-C
    "specs": 1190,  # naming; which transposes can be made from codes; two codes a byte; codes that are only read
    "recipes": 700,  # transposed_from, a backward that dequantizes, files of the recipes of layers; mxfp4_weights
    "reference": 2175,  # rows with bits of their own: attention, norms, gates; chains; MXFP4; parts of gradients
    "tuning": 1600,  # tiles of transposes that are made from codes
    "launch": 5200,  # transposes from codes, also of groups; chains; MXFP4; parts of gradients; new numbers of rows
    "ops": 1980,  # rows and fakes of ops whose rows have bits of their own; ops from codes; chains; unread casts
    "layers": 7150,  # chains, operands from codes, a backward that dequantizes; rows that travelled; MXFP4, rounded to
    "functional": 380,
    "conversion": 1845,  # the host's launches in filter="auto", by the block; conditioning layers of diffusion models
    "export": 3490,  # MXFP4; NVFP4; load_tensors, headers of a stream; a checkpoint as it was loaded; ranks that save
    "rollout": 3030,  # weights for engines; a generator that shares codes, what differs by modules; exact models
    "optim": 490,
    "distributed": 6480,  # codes sent once; weights rounded before; gradients in 8 bits, in one order, and their norm
    "workflow": 3530,  # sampled steps in figures, for loggers; recipes to a file; MXFP4; self-tests of gradients
    "training": 1470,  # the check of a device, which was in cli, too; the benchmark's clocks and peaks of memory
    "warmup": 1430,
    "integrations": 1060,  # figures of sampled steps in the logs of two trainers; from_pretrained, also of AutoModel
    "advice": 1935,  # tritonfp8 advise: blocks, steps and layers measured or predicted, and a recommendation
    "cli": 470,  # the command advise
    "__main__": 10,
    "tritonfp8": 80,
}


# The most lines of all tests: it falls and rises like a limit in ROOM_LINES.
# MXFP4; NVFP4; codes in each mode; health; advice; diffusion; engines; chains; exact models; scaling; gradients
# in 8 bits and in an order that no number of ranks changes; checkpoints in graphs of torch 2.11; whole models
TEST_LINES = 59_950


def room_violations(modules, limits=None):
    """Rooms with more lines than their limit; and limits that lie a tenth, and 30 lines, above: they follow down."""
    limits = ROOM_LINES if limits is None else limits
    lines = Counter()
    for module in modules:
        lines[module.room] += len(module.source.splitlines())
    return [
        f"{room} has {lines[room]} lines, and ROOM_LINES allows {limits.get(room, 0)}"
        for room in sorted({*lines, *limits})
        if not min(0.9 * (limit := limits.get(room, 0)), limit - 30) <= lines[room] <= limit
    ]


def total_violations(modules, limit=TEST_LINES):
    """The tests, if they have more lines than their limit, or a tenth fewer."""
    lines = sum(len(module.source.splitlines()) for module in modules)
    return [] if 0.9 * limit <= lines <= limit else [f"tests have {lines} lines, and TEST_LINES allows {limit}"]
