"""The rules of the layout, as functions from modules to violations. They read the source and run none of it."""

import ast
import graphlib
import re
import sys
from collections import Counter
from dataclasses import dataclass

from tritonfp8.formats import FORMATS, SCALE_FORMATS

# Rooms, lowest first: a folder of the package, or a module that lies in no folder. Those of a layer do not import each
# other; `tritonfp8` is the package's own namespace.
LAYERS = (
    {"kernels"},
    {"checks", "compat", "counting", "formats", "hardware"},
    {"specs"},
    {"quantized", "recipes", "reference", "testing"},
    {"tuning"},
    {"launch"},
    {"ops"},
    {"layers"},
    {"layers.linear"},
    {"layers.moe"},
    {"layers.stored"},
    {"functional", "modules"},
    {"conversion"},
    {"convert"},
    {"export", "optim", "stored_init"},
    {"tritonfp8"},
    {"distributed"},
    {"workflow"},
    {"training"},
    {"warmup"},
    {"integrations"},
    {"cli"},
    {"__main__"},
)
RANKS = {room: rank for rank, layer in enumerate(LAYERS) for room in layer}
ABOVE_THE_CORE = set().union(*LAYERS[RANKS["tritonfp8"] + 1 :])
# What lies above the ops reaches kernels through the dispatcher only.
ABOVE_OPS = set().union(*LAYERS[RANKS["ops"] + 1 : RANKS["tritonfp8"]], {"distributed"})
BEHIND_OPS = {"kernels", "launch", "reference"}
MAY_IMPORT_DISTRIBUTED = ("distributed", "workflow", "integrations")
# Plain numbers, which the host reads too.
KERNEL_DATA = "tritonfp8.kernels.matmul.sizes"

MUTABLE_DATACLASSES = {
    "tritonfp8.counting.GemmCounts": "counts",
    "tritonfp8.integrations.torchtitan.Config": "torchtitan fills and replaces fields of a tree of configs",
    "tritonfp8.integrations.torchtitan.Float8ModelConfig": "likewise",
    "tritonfp8.training.loop.Result": "filled while training, so that Ctrl-C keeps what was measured",
    "tritonfp8.training.loop.Run": "likewise",
}
MAY_SET_FROZEN_FIELDS = {"__post_init__", "tritonfp8.quantized.unchecked", "tritonfp8.quantized.unchecked_groups"}
MAY_READ_THE_ENVIRONMENT = (*(f"tritonfp8.{room}" for room in ABOVE_THE_CORE), "tritonfp8.tuning.store")
# Functions, or a stride in one.
BOUNDED = "the host copies a tensor whose offsets exceed 32 bits (View.within_32_bits)"
STRIDES_OF_32_BITS = {
    **dict.fromkeys(("_read_scale", "read_rows", "read_columns", "scale_tile"), BOUNDED),
    **dict.fromkeys(
        ("block_scaled_matmul_kernel.stride_a_scale_k", "block_scaled_matmul_kernel.stride_b_scale_k"), BOUNDED
    ),
    **dict.fromkeys(("_multiply.stride_ag", "_multiply.stride_bg"), BOUNDED),
    **dict.fromkeys(("_load.stride_cn",), BOUNDED),
    "fill_stage": "TMA coordinates have 32 bits; the host copies scales whose offsets exceed them",
    "quantize_shards_kernel": "indices come from an int64 table",
    "quantize_tile_kernel": "the result index is 0 or 1",
}
PICKLERS = {"_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# What a later torch or triton may change: named in these modules, which check at import that the names are there.
ADAPTERS = ("tritonfp8.compat", "tritonfp8.distributed")
TRITON_INTERNALS = re.compile(r"triton\.(backends|compiler|knobs|runtime)\b")
TRITON_ATTRIBUTES = {
    "arg_annotations", "global_scratch_size", "kernel_signature", "launch_cooperative_grid", "packed_metadata",
    "profile_scratch_size", "tensordesc_meta",
}  # fmt: skip
# Private by their path alone: torch documents each, and has no other path to it.
DOCUMENTED = {
    "torch.utils._pytree": "where containers of tensors are registered",
    "torch.utils._python_dispatch.TorchDispatchMode": "how a mode sees every operation",
    "torch._subclasses.fake_tensor.FakeTensorMode": "how a model is run without memory",
}
MAX_FILES, MAX_FILE_LINES, MAX_FUNCTION_LINES = 12, 400, 60
# As torch spells them. None stands for what is left out.
SCHEMA_TYPES = {
    "Tensor",
    "Optional[Tensor]",
    "List[Tensor]",
    "str",
    "Optional[str]",
    "int",
    "SymInt",
    "List[int]",
    "List[SymInt]",
    "bool",
    "float",
    "ScalarType",
    "Optional[ScalarType]",
}
INVERSE_SCALE = re.compile(r"inv(erse)?_?scale|scales?_?inv", re.IGNORECASE)


@dataclass(frozen=True)
class Module:
    name: str
    source: str
    is_package: bool = False

    @property
    def tree(self):
        return ast.parse(self.source)

    @property
    def folder(self):
        """The package that this is, or lies in."""
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @property
    def room(self):
        """The key of LAYERS: the longest that the name begins with."""
        name = self.name.partition(".")[2] or self.name
        parts = name.split(".")
        return next((room for n in (2, 1) if (room := ".".join(parts[:n])) in RANKS), name)

    @property
    def is_kernel(self):
        return self.room == "kernels" and not self.is_package


def read_module(path, root, package):
    parts = path.relative_to(root).with_suffix("").parts
    is_package = parts[-1] == "__init__"
    return Module(".".join((*package, *parts[: -1 if is_package else None])), path.read_text(), is_package)


def imports(module):
    """Each import, wherever in the module: ``(a, None)`` for ``import a``, ``(a, b)`` for ``from a import b``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                package = module.name.split(".")[: None if module.is_package else -1]
                base = package[: len(package) - node.level + 1] + base
            yield from ((".".join(base), alias.name) for alias in node.names)


def imported_modules(module, names):
    """Those of ``names`` that ``module`` imports: ``from a import b`` is ``a.b`` where that is a module, else ``a``."""
    found = (
        base if f"{base}.{attribute}" not in names else f"{base}.{attribute}" for base, attribute in imports(module)
    )
    return {name for name in found if name in names} - {module.name}


def _is_within(name, folder):
    return f"{name}.".startswith(f"{folder}.")


def _is_exported(module, by_name):
    """Whether its folder lists this module in `__all__`."""
    body = by_name[module.folder].tree.body if module.folder in by_name else []
    lists = [node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"]
    return any(module.name.rpartition(".")[2] in ast.literal_eval(names) for names in lists)


def import_violations(modules):
    by_name = {module.name: module for module in modules}
    graph = {module.name: imported_modules(module, by_name) for module in modules}
    violations = []
    for name, imports in graph.items():
        module = by_name[name]
        if module.room not in RANKS:
            violations.append(f"{name}: give {module.room!r} its place in LAYERS")
            continue
        for imported in sorted(imports):
            other = by_name[imported]
            if RANKS.get(other.room, -1) > RANKS[module.room]:
                violations.append(f"{name} imports {imported}, which lies above it")
            elif other.room != module.room and RANKS.get(other.room, -1) == RANKS[module.room]:
                violations.append(f"{name} imports {imported}, which lies beside it")
            elif other.room == "distributed" and module.room not in MAY_IMPORT_DISTRIBUTED:
                violations.append(f"{name} imports {imported}: only {', '.join(MAY_IMPORT_DISTRIBUTED)} may")
            elif module.room in ABOVE_OPS and other.room in BEHIND_OPS:
                violations.append(f"{name} imports {imported} past the ops")
            elif not (
                other.is_package or other.is_kernel or _is_within(name, other.folder) or _is_exported(other, by_name)
            ):
                violations.append(f"{name} imports {imported}, a file of another folder: import {other.folder}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        violations.append("imports in a circle: " + " -> ".join(error.args[1]))
    return violations


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


def kernel_violations(modules):
    """Device code imports triton and siblings; and asserts by ``tl.static_assert``, which runs when it compiles."""
    violations = []
    for module in filter(lambda m: m.is_kernel, modules):
        for base in sorted({base for base, _ in imports(module)}):
            standard = base.split(".")[0] in sys.stdlib_module_names and module.name == KERNEL_DATA
            if not (standard or re.match(r"triton(\.|$)|tritonfp8\.kernels(\.|$)", base)):
                violations.append(f"{module.name} imports {base}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assert):
                violations.append(f"{module.name}:{node.lineno} asserts; use tl.static_assert")
    return violations


def stride_violations(modules):
    """Device code multiplies strides in 64 bits: a stride is a caller's, and an offset may lie beyond 2^31."""
    violations = []
    for module in filter(lambda m: m.is_kernel, modules):
        for function in filter(lambda node: isinstance(node, ast.FunctionDef), module.tree.body):
            for node in ast.walk(function):
                if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                    continue
                sides = ast.unparse(node.left), ast.unparse(node.right)
                strides = [side for side in sides if re.match(r"stride(_|$)", side)]
                allowed = {
                    function.name,
                    *(f"{function.name}.{stride}" for stride in strides),
                } & STRIDES_OF_32_BITS.keys()
                if strides and not any("int64" in side for side in sides) and not allowed:
                    violations.append(f"{module.name}:{node.lineno} multiplies in 32 bits: {ast.unparse(node)}")
    return violations


def _is_format(node):
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_format, node.elts))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in {*FORMATS, *SCALE_FORMATS}
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.startswith("float8")


def format_violations(modules):
    """Comparisons with a format, by name or by dtype, and tables of formats, anywhere but in formats.py."""
    violations = []
    for module in modules:
        if module.name == "tritonfp8.formats":
            continue
        for node in ast.walk(module.tree):
            compared = {
                ast.Compare: lambda n: [n.left, *n.comparators],
                ast.MatchValue: lambda n: [n.value],
                ast.Dict: lambda n: [key for key in n.keys if key],
            }.get(type(node), lambda n: [])(node)
            if any(map(_is_format, compared)):
                violations.append(f"{module.name}:{node.lineno} decides by a format: {ast.unparse(node)[:80]}")
    return violations


def _identifiers(tree):
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(value := getattr(node, field, None), str):
                yield value, getattr(node, "lineno", 0)


def inverse_scale_violations(modules):
    return [
        f"{module.name}:{line} names {name}: `scale` always multiplies to dequantize"
        for module in modules
        for name, line in _identifiers(module.tree)
        if INVERSE_SCALE.search(name)
    ]


def environment_violations(modules):
    readers = {"environ", "environb", "getenv", "putenv"}
    violations = []
    for module in modules:
        if f"{module.name}.".startswith(tuple(f"{name}." for name in MAY_READ_THE_ENVIRONMENT)):
            continue
        for base, attribute in imports(module):
            if base == "os" and attribute in readers:
                violations.append(f"{module.name} imports os.{attribute}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr in readers and ast.unparse(node.value) == "os":
                violations.append(f"{module.name}:{node.lineno} uses os.{node.attr}")
    return violations


def pickle_violations(modules):
    violations = []
    for module in modules:
        for name in sorted({base.split(".")[0] for base, _ in imports(module)} & PICKLERS):
            violations.append(f"{module.name} imports {name}")
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            function, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if function == "torch.save" or (function == "torch.load" and keywords.get("weights_only") != "True"):
                violations.append(f"{module.name}:{node.lineno} pickles: {ast.unparse(node)}")
    return violations


def _is_private(name):
    root, *path = name.split(".")
    if root == "torch":
        return any(re.match(r"_(?!_)", part) for part in path) and not any(_is_within(name, d) for d in DOCUMENTED)
    return bool(TRITON_INTERNALS.match(name))


def private_violations(modules):
    """Private names of torch and triton, as attributes and imports, anywhere but in the modules that check them."""
    violations = []
    for module in modules:
        if any(_is_within(module.name, adapter) for adapter in ADAPTERS):
            continue
        named = [f"{base}.{attribute}" if attribute else base for base, attribute in imports(module)]
        attributes = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
        inner = {id(node.value) for node in attributes}
        named += [ast.unparse(node) for node in attributes if id(node) not in inner]
        for name in sorted(filter(_is_private, named)):
            violations.append(f"{module.name} uses {name}: name it in tritonfp8.compat")
        for node in attributes:
            if node.attr in TRITON_ATTRIBUTES:
                violations.append(
                    f"{module.name}:{node.lineno} uses {node.attr} of triton: name it in tritonfp8.compat"
                )
    return violations


def _dataclass_is_mutable(node):
    for decorator in node.decorator_list:
        is_call = isinstance(decorator, ast.Call)
        if ast.unparse(decorator.func if is_call else decorator) in ("dataclass", "dataclasses.dataclass"):
            keywords = decorator.keywords if is_call else []
            return not any(k.arg == "frozen" and ast.unparse(k.value) == "True" for k in keywords)
    return False


def frozen_violations(modules):
    """Data classes that are not frozen, and writes past the freeze."""
    violations = []
    for module in modules:
        for node in ast.walk(module.tree):
            name = f"{module.name}.{getattr(node, 'name', '')}"
            if isinstance(node, ast.ClassDef) and _dataclass_is_mutable(node) and name not in MUTABLE_DATACLASSES:
                violations.append(f"{module.name}:{node.lineno} {node.name} is not frozen, nor in MUTABLE_DATACLASSES")
            if isinstance(node, ast.FunctionDef) and not {node.name, name} & MAY_SET_FROZEN_FIELDS:
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "object.__setattr__":
                        violations.append(f"{module.name}:{call.lineno} {node.name} writes to a frozen object")
    return violations


def size_violations(modules):
    violations = []
    for module in modules:
        if (lines := len(module.source.splitlines())) > MAX_FILE_LINES:
            violations.append(f"{module.name} has {lines} lines")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines >= MAX_FUNCTION_LINES:
                    violations.append(f"{module.name}:{node.lineno} {node.name} has {lines} lines")
    return violations


def schema_violations(schemas):
    """Schemas (torch's own objects) with arguments of other types, or that name an inverse scale."""
    violations = []
    for schema in schemas:
        for argument in schema.arguments:
            if str(argument.real_type) not in SCHEMA_TYPES:
                violations.append(f"{schema}: {argument.name} is of type {argument.real_type}")
            if INVERSE_SCALE.search(argument.name):
                violations.append(f"{schema}: {argument.name}")
    return violations
