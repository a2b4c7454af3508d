"""Compile a Triton kernel for a CUDA target without a GPU, and report the assembler's figures.

Needs a process in which triton compiles (``TRITON_INTERPRET`` unset or 0), so its users are in tests/compile_only.
"""

import contextlib
import dataclasses
import io
import re
from dataclasses import dataclass

import torch
import triton
from compile_store import stored
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tritonfp8.compat import hardware
from tritonfp8.compat.triton_private import settle_key
from tritonfp8.launch import executor
from tritonfp8.launch.kernel_cache import COMPILER_OPTIONS

WARP_SIZE = 32
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5", torch.uint8: "*u8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
WAIT = "griddepcontrol.wait"
# Instructions that tests read: products, memory, barriers, casts to FP8, and products with sums in fp32.
INSTRUCTION = re.compile(
    r"(?<![\w.%$])(wgmma|mma|tcgen05|cp|ld|st|red|atom|prefetch|mbarrier|barrier|bar|fence|griddepcontrol)\.[\w:.]+"
    r"|cvt\.rn\.satfinite[\w.]+|(mul|fma)\.rn\.f32\w*|\.target \w+"
)
WAIT_OR_ACCESS = re.compile(rf"{re.escape(WAIT)}|\b(ld|st|red|atom|prefetch)(\.\w+)*?\.global|\bcp\.(async|reduce)")


@dataclass(frozen=True)
class CompiledReport:
    """A compiled kernel.

    Attributes:
        ptx: the instructions of the PTX text that :data:`INSTRUCTION` matches, without operands, a line each.
        registers: registers per thread, of the function that takes most.
        spill_bytes: spilled bytes per thread, stores and loads together.
        shared_bytes: shared memory of a block, as the launcher requests it.
        log: the warnings of ``ptxas -v``.
    """

    ptx: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    log: str


def descriptor(element, block, layout=None):
    """Type of a host TMA descriptor in a signature, such as ``tensordesc<fp8e4nv[128, 128]>``.

    Args:
        element: element type, ``"fp8e4nv"``, ``"fp8e5"``, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        block: block shape.
        layout: for Gluon, the layout of the block in shared memory.
    """
    return f"tensordesc<{element}{list(block)}{f',{layout!r}' if layout else ''}>"


def compile_kernel(fn, signature, constexprs, cc, num_warps=4, num_stages=3, divisible_by_16=(), **options):
    """Compile ``fn`` for compute capability ``cc``, once for all tests, and return a :class:`CompiledReport`.

    Args:
        fn: a ``triton.jit`` or ``gluon.jit`` function.
        signature: name -> type of each run-time argument: a pointer such as ``"*fp8e4nv"``, ``"i32"``, or a host TMA
            descriptor from :func:`descriptor`.
        constexprs: name -> value of every other argument, also of values that the launcher specializes: None, the
            integer 1. DEPENDENT is chosen as the launcher does.
        cc: 89, 90, 100, ...
        divisible_by_16: names of pointers and integers that the launcher would specialize as divisible by 16.
        options: further launch options, such as ``maxnreg``.

    Raises:
        ValueError: the names do not match the arguments of ``fn``.
        RuntimeError: this process interprets kernels; or the kernel reads or writes memory before it waits for the
            previous kernel, which may still run (programmatic dependent launch).
        triton.CompilationError and others: errors of the compiler.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("triton interprets in this process: run it as TRITON_INTERPRET=0 pytest tests/compile_only")
    index = {name: i for i, name in enumerate(fn.arg_names)}
    if "DEPENDENT" in index:
        signature = {name: kind for name, kind in signature.items() if name != "DEPENDENT"}
        constexprs = {**constexprs, "DEPENDENT": cc >= 90}
    if set(signature) & set(constexprs) or set(signature) | set(constexprs) != set(index):
        raise ValueError(
            f"signature and constexprs must name each of {sorted(index)} once; "
            f"got {sorted(signature)} and {sorted(constexprs)}"
        )
    if unknown := set(divisible_by_16) - set(signature):
        raise ValueError(f"divisible_by_16 names {sorted(unknown)}, which the signature does not")
    settle_key(fn)
    source = (GluonASTSource if fn.is_gluon() else ASTSource)(
        fn=fn,
        signature={name: signature.get(name, "constexpr") for name in fn.arg_names},
        constexprs={(index[name],): value for name, value in constexprs.items()},
        attrs={(index[name],): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, **COMPILER_OPTIONS, **options}
    target = GPUTarget("cuda", cc, WARP_SIZE)
    default_fusion = triton.knobs.language.default_fp_fusion
    key = (triton.__version__, fn.__name__, source.hash(), target, sorted(options.items()), default_fusion)
    report = CompiledReport(**stored(repr(key), lambda: dataclasses.asdict(_compile(source, target, options))))
    if constexprs.get("DEPENDENT") and not waits_first(report.ptx):
        raise RuntimeError(f"{fn.__name__} reads or writes memory before it waits for the kernel before it")
    return report


def _compile(source, target, options):
    with triton.knobs.compilation.scope(), triton.knobs.nvidia.scope():
        # A cached kernel is not assembled again, so it writes no log.
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(io.StringIO()) as captured:
            kernel = triton.compile(source, target=target, options=options)
    return read_report(kernel.asm["ptx"], kernel.metadata.shared, captured.getvalue())


def waits_first(ptx):
    """Whether the kernel's PTX waits for the previous kernel before its first access to memory."""
    first = WAIT_OR_ACCESS.search(ptx)
    return first is not None and first[0] == WAIT


def note_launches(monkeypatch, cc, *modules, **abilities):
    """Have plans launch for a device of compute capability ``cc`` from now on, and note what they would launch.

    So do launches of ``modules`` without a plan, by a ``run`` of their own. ``abilities`` are more abilities
    that the device has.

    Returns:
        A list that grows with each launch: ``(kernel, arguments of run after the number of programs, options)``.
    """
    found = []
    has = dataclasses.replace(
        hardware.CPU, capability=divmod(cc, 10), has_direct_cast=cc >= 90, num_sms=132, **abilities
    )
    monkeypatch.setattr(hardware, "abilities", lambda device: has)

    def note(kernel, programs, *arguments, **options):
        found.append((kernel, arguments, options))

    for module in (executor, *modules):
        if hasattr(module, "run"):
            monkeypatch.setattr(module, "run", note)
    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(executor, "_repeat_or_warn", lambda *args: None)
    return found


def compile_launch(cc, kernel, pointers, integers, constants, **options):
    """Compile the kernel that :func:`tritonfp8.launch.kernel_cache.run` would launch, with all pointers aligned.

    Args:
        cc: as in :func:`compile_kernel`.
        kernel, pointers, integers, constants, options: as in :func:`tritonfp8.launch.kernel_cache.run`.
    """
    names = list(kernel.arg_names)
    given = dict(zip(names, pointers, strict=False))
    signature = {name: _type_of(pointer) for name, pointer in given.items() if pointer is not None}
    divisible = [name for name, kind in signature.items() if kind.startswith("*")]
    constants = {**{name: None for name, pointer in given.items() if pointer is None}, **constants}
    for name, value in zip(names[len(pointers) :], integers, strict=False):
        if value == 1 and name not in kernel.do_not_specialize:
            constants[name] = 1
            continue
        signature[name] = "i32" if value < 2**31 else "i64"
        if value % 16 == 0:
            divisible.append(name)
    return compile_kernel(kernel, signature, constants, cc, divisible_by_16=divisible, **options)


def _type_of(pointer):
    """Type in a signature of a tensor or of a TMA descriptor."""
    if not hasattr(pointer, "block_shape"):
        return POINTERS[pointer.dtype]
    return descriptor(POINTERS[pointer.base.dtype][1:], pointer.block_shape, getattr(pointer, "layout", None))


def read_report(ptx, shared_bytes, log):
    """The report of a kernel by its PTX and the log of ``ptxas -v``.

    Raises:
        RuntimeError: the log has no figures, as after a change of its format.
    """
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    if not registers or not spills:
        raise RuntimeError(f"no registers or spills in the output of ptxas:\n{log}")
    instructions = "\n".join(found[0] for found in INSTRUCTION.finditer(ptx))
    warnings = "\n".join(line for line in log.splitlines() if "info" not in line and line.strip())
    return CompiledReport(instructions, max(registers), sum(spills), shared_bytes, warnings)
