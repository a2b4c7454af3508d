"""What code may say: kernels, strides, formats, environment variables, pickles, private names, frozen data classes."""

import ast
import re
import sys

from .modules import LAYERS, RANKS, ROOT, imports, is_within

ABOVE_THE_CORE = set().union(*LAYERS[RANKS["tritonfp8"] + 1 :])
# Plain numbers, which the host reads too.
KERNEL_DATA = "tritonfp8.kernels.gemm.sizes"
# Of the standard library, what makes the records of device code.
DEVICE_RECORD = ("collections", "namedtuple")
# Of a device helper. An entry, named `*_kernel`, takes what the host launches it with, one by one.
MAX_DEVICE_PARAMETERS = 12

MUTABLE_DATACLASSES = {
    "tritonfp8.advice.measure.Measured": "filled while measuring, so that Ctrl-C keeps what was measured",
    "tritonfp8.advice.predict.Work": "counts",
    "tritonfp8.compat.counting.GemmCounts": "counts",
    "tritonfp8.integrations.torchtitan.Config": "torchtitan fills and replaces fields of a tree of configs",
    "tritonfp8.integrations.torchtitan.Float8ModelConfig": "see Config",
    "tritonfp8.training.loop.Result": "filled while training, so that Ctrl-C keeps what was measured",
    "tritonfp8.training.loop.Run": "see Result",
}
MAY_SET_FROZEN_FIELDS = {
    "__post_init__",
    "tritonfp8.specs.quantized.unchecked",
    "tritonfp8.specs.quantized.unchecked_groups",
}
MAY_READ_THE_ENVIRONMENT = (*(f"tritonfp8.{room}" for room in ABOVE_THE_CORE), "tritonfp8.tuning.store")
# Functions, or a stride in one.
BOUNDED = "the host copies a tensor whose offsets exceed 32 bits (View.within_32_bits)"
STRIDES_OF_32_BITS = {
    **dict.fromkeys(
        (
            "_read_scale", "read_rows", "read_columns", "scale_tile", "block_scaled_matmul_kernel.stride_a_scale_k",
            "block_scaled_matmul_kernel.stride_b_scale_k", "_multiply.stride_ag", "_multiply.stride_bg",
            "_load.stride_cn",
        ),
        BOUNDED,
    ),
    "fill_stage": "TMA coordinates have 32 bits; the host copies scales whose offsets exceed them",
    "quantize_shards_kernel": "indices come from an int64 table",
    "quantize_tile_kernel": "the result index is 0 or 1",
}  # fmt: skip
PICKLERS = {"_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
# What a later torch or triton may change: named in these modules, which check at import that the names are there.
ADAPTERS = ("tritonfp8.compat", "tritonfp8.distributed")
TRITON_INTERNALS = re.compile(r"triton\.(backends|compiler|knobs|runtime)\b")
TRITON_ATTRIBUTES = {
    "arg_annotations", "global_scratch_size", "kernel_signature", "launch_cooperative_grid", "packed_metadata",
    "profile_scratch_size", "tensordesc_meta",
}  # fmt: skip
# Private only by their path: torch documents each, and has no other path to it.
DOCUMENTED = {
    "torch.utils._pytree": "where containers of tensors are registered",
    "torch.utils._python_dispatch.TorchDispatchMode": "how a mode sees every operation",
    "torch._subclasses.fake_tensor": "how a model is run without memory, and what it raises",
}
# As torch spells them. None stands for what is left out.
SCHEMA_TYPES = {
    "Tensor", "Optional[Tensor]", "List[Tensor]", "str", "Optional[str]", "int", "SymInt", "List[int]", "List[SymInt]",
    "bool", "float", "ScalarType", "Optional[ScalarType]",
}  # fmt: skip
INVERSE_SCALE = re.compile(r"inv(erse)?_?scale|scales?_?inv", re.IGNORECASE)


def _format_names():
    """The names of the tables in formats.py, which this reads and does not import: torch takes seconds."""
    body = ast.parse((ROOT / "tritonfp8" / "specs" / "formats.py").read_text()).body
    tables = {node.target.id: node.value.args[0] for node in body if isinstance(node, ast.AnnAssign)}
    return {key.value for name in ("FORMATS", "SCALE_FORMATS") for key in tables[name].keys}


FORMAT_NAMES = _format_names()


def kernel_violations(modules):
    """Device code imports triton and siblings; and asserts by ``tl.static_assert``, which runs when it compiles."""
    violations = []
    for module in filter(lambda m: m.is_kernel, modules):
        for base in sorted({each[0] for each in imports(module) if each != DEVICE_RECORD}):
            standard = base.split(".")[0] in sys.stdlib_module_names and module.name == KERNEL_DATA
            if not (standard or re.match(r"triton(\.|$)|tritonfp8\.kernels(\.|$)", base)):
                violations.append(f"{module.name} imports {base}")
        for node in module.nodes:
            if isinstance(node, ast.Assert):
                violations.append(f"{module.name}:{node.lineno} asserts; use tl.static_assert")
    return violations


def _device_functions(modules):
    """Each function of device code, with its module."""
    for module in filter(lambda m: m.is_kernel, modules):
        yield from ((module, node) for node in module.tree.body if isinstance(node, ast.FunctionDef))


def device_violations(modules):
    """Device helpers of too many parameters, and tuples that are read by number: both become records."""
    violations = []
    for module, function in _device_functions(modules):
        if not any(re.match(r"(triton|gluon)\.jit\b", ast.unparse(each)) for each in function.decorator_list):
            continue
        count = len([*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs])
        if count > MAX_DEVICE_PARAMETERS and not function.name.endswith("_kernel"):
            violations.append(f"{module.name}:{function.lineno} {function.name} has {count} parameters")
        for node in filter(lambda node: isinstance(node, ast.Subscript), ast.walk(function)):
            of_shape = isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
            if re.fullmatch(r"-?\d+", ast.unparse(node.slice)) and not of_shape:
                violations.append(f"{module.name}:{node.lineno} reads by number: {ast.unparse(node)}")
    return violations


def stride_violations(modules):
    """Device code multiplies strides in 64 bits: a stride is a caller's, and an offset may lie beyond 2^31."""
    violations = []
    for module, function in _device_functions(modules):
        for node in ast.walk(function):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                continue
            sides = ast.unparse(node.left), ast.unparse(node.right)
            strides = [side for side in sides if re.match(r"(\w+\.)*stride(_|$)", side)]
            names = {function.name, *(f"{function.name}.{stride.rpartition('.')[2]}" for stride in strides)}
            if strides and not any("int64" in side for side in sides) and not names & STRIDES_OF_32_BITS.keys():
                violations.append(f"{module.name}:{node.lineno} multiplies in 32 bits: {ast.unparse(node)}")
    return violations


def _is_format(node):
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_is_format, node.elts))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in FORMAT_NAMES
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.startswith("float8")


def format_violations(modules):
    """Comparisons with a format, by name or by dtype, and tables of formats, anywhere but in formats.py."""
    violations = []
    for module in modules:
        if module.name == "tritonfp8.specs.formats":
            continue
        for node in module.nodes:
            compared = {
                ast.Compare: lambda n: [n.left, *n.comparators],
                ast.MatchValue: lambda n: [n.value],
                ast.Dict: lambda n: [key for key in n.keys if key],
            }.get(type(node), lambda n: [])(node)
            if any(map(_is_format, compared)):
                violations.append(f"{module.name}:{node.lineno} decides by a format: {ast.unparse(node)[:80]}")
    return violations


def _identifiers(module):
    for node in module.nodes:
        for field in ("id", "attr", "arg", "name", "asname"):
            if isinstance(value := getattr(node, field, None), str):
                yield value, getattr(node, "lineno", 0)


def inverse_scale_violations(modules):
    return [
        f"{module.name}:{line} names {name}: `scale` always multiplies to dequantize"
        for module in modules
        for name, line in _identifiers(module)
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
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and node.attr in readers and ast.unparse(node.value) == "os":
                violations.append(f"{module.name}:{node.lineno} uses os.{node.attr}")
    return violations


def pickle_violations(modules):
    violations = []
    for module in modules:
        for name in sorted({base.split(".")[0] for base, _ in imports(module)} & PICKLERS):
            violations.append(f"{module.name} imports {name}")
        for node in module.nodes:
            if not isinstance(node, ast.Call):
                continue
            function, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if function == "torch.save" or (function == "torch.load" and keywords.get("weights_only") != "True"):
                violations.append(f"{module.name}:{node.lineno} pickles: {ast.unparse(node)}")
    return violations


def _is_private(name):
    root, *path = name.split(".")
    if root == "torch":
        return any(re.match(r"_(?!_)", part) for part in path) and not any(is_within(name, d) for d in DOCUMENTED)
    return bool(TRITON_INTERNALS.match(name))


def private_violations(modules):
    """Private names of torch and triton, as attributes and imports, anywhere but in the modules that check them."""
    violations = []
    for module in modules:
        if any(is_within(module.name, adapter) for adapter in ADAPTERS):
            continue
        named = [f"{base}.{attribute}" if attribute else base for base, attribute in imports(module)]
        attributes = [node for node in module.nodes if isinstance(node, ast.Attribute)]
        inner = {id(node.value) for node in attributes}
        named += [ast.unparse(node) for node in attributes if id(node) not in inner]
        for name in sorted(filter(_is_private, named)):
            violations.append(f"{module.name} uses {name}: name it in tritonfp8.compat")
        for node in attributes:
            if node.attr in TRITON_ATTRIBUTES:
                what = f"uses {node.attr} of triton: name it in tritonfp8.compat"
                violations.append(f"{module.name}:{node.lineno} {what}")
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
        for node in module.nodes:
            name = f"{module.name}.{getattr(node, 'name', '')}"
            if isinstance(node, ast.ClassDef) and _dataclass_is_mutable(node) and name not in MUTABLE_DATACLASSES:
                violations.append(f"{module.name}:{node.lineno} {node.name} is not frozen, nor in MUTABLE_DATACLASSES")
            if isinstance(node, ast.FunctionDef) and not {node.name, name} & MAY_SET_FROZEN_FIELDS:
                for call in ast.walk(node):
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "object.__setattr__":
                        violations.append(f"{module.name}:{call.lineno} {node.name} writes to a frozen object")
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
