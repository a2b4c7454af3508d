"""Launches everything on the stub of the CUDA driver, by ``kernel[grid]`` and by repeated plans, and compares each
parameter. The values of tensors are never read.

Runs in a process of its own, with ``LD_LIBRARY_PATH`` at the stub; prints a line a case, exits with 1 on a difference.
Arguments limit it to the cases whose label contains one of them.
"""

import contextlib
import ctypes
import math
import re
import sys
import warnings

import stub
import torch

stub.patch()

from tritonfp8 import recipes, reference
from tritonfp8.compat import hardware, triton_private
from tritonfp8.launch import casts, executor, figures, gemms, kernel_cache
from tritonfp8.ops import fakes
from tritonfp8.specs import BLOCKS, QuantSpec

stub.patch_abilities(hardware)
BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "u64": 8}
SCRATCH = 2

driver = ctypes.CDLL("libcuda.so.1")
driver.stub_word.restype = ctypes.c_uint64


def parameters(kernel):
    """Of each parameter of a compiled kernel: its size in bytes as the driver gets it, and whether it is an address.

    A tensor map begins with an address.
    """
    found = []
    for kind in kernel.src.signature.values():
        if kind.startswith("tensordesc"):
            rank = re.search(r"\[([\d, ]+)\]", kind)[1].count(",") + 1
            found += [(128, True), *[(4, False)] * rank, *[(8, False)] * rank]
        elif kind != "constexpr":
            found.append((8, True) if kind.startswith("*") else (BYTES[kind], False))
    return [*found, *[(8, True)] * SCRATCH]


def described():
    for kernel in kernel_cache._compiled.values():
        sizes = [size for size, _ in parameters(kernel)]
        driver.stub_describe(kernel.function, len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    return {kernel.function: parameters(kernel) for kernel in kernel_cache._compiled.values()}


def launched(call, names):
    """What ``call`` launched, with the addresses of tensors by name; temporaries by their order."""
    driver.stub_clear()
    out = call()
    results = out if isinstance(out, tuple | list) else (out,)
    known = {t.data_ptr(): name for name, t in names.items() if t is not None}
    known |= {t.data_ptr(): f"result {i}" for i, t in enumerate(results)}
    kinds, log = described(), []
    for i in range(driver.stub_launches()):
        function = driver.stub_function(i)
        words = [
            [driver.stub_word(i, p, w) for w in range(max(1, size // 8))] for p, (size, _) in enumerate(kinds[function])
        ]
        for word, (_, is_address) in zip(words, kinds[function], strict=True):
            if is_address and word[0]:
                word[0] = known.setdefault(word[0], f"temporary {len(known)}")
        log.append((function, driver.stub_grid(i), driver.stub_threads(i), driver.stub_shared(i), words))
    return log, [(t.shape, t.stride(), t.dtype) for t in results]


# Fake casts make the operands of products: a real one, which has cases of its own, would be compiled for their shapes.
def cases():
    def x(m, n, dtype=torch.bfloat16, step=1):
        return torch.ones(m * step, n).to(dtype)[::step]

    # By pairs of block, shape and op: each op has the shape that the other op has not, in turn.
    shapes = (256, 512), (129, 1000)
    for number, (block, entry) in enumerate(BLOCKS.items()):
        scale_format = entry.scale_formats[0]
        spec = QuantSpec("e4m3", block, scale_format, "pow2")
        one, other = shapes[number % 2], shapes[1 - number % 2]
        yield f"quantize {entry.name} {one}", casts.quantize, lambda s=one, q=spec: (x(*s), *q.args, False, None)
        yield (
            f"both {entry.name} {other}",
            casts.quantize_both,
            lambda s=other, q=spec: (x(*s, torch.float32), *q.args, *q.args),
        )

        def dequantize(q=spec):
            return (*fakes.quantize(x(129, 384), *q.args), *q.args, torch.float32)

        yield f"dequantize {entry.name}", casts.dequantize, dequantize
        yield f"transposed {entry.name}", casts.quantize, lambda q=spec: (x(129, 384), *q.args, True, None)
        yield f"amax {entry.name}", casts.amax, lambda b=block: (x(129, 384), list(b))
        for transposed in (False, True):

            def given_amax(q=spec, b=block, transposed=transposed):
                values = x(129, 384)
                return values, *q.args, transposed, reference.amax(values.t() if transposed else values, list(b))

            yield f"given amax {entry.name} transposed={transposed}", casts.quantize, given_amax
        yield f"strided {entry.name}", casts.quantize, lambda q=spec: (x(128, 384, step=2), *q.args, False, None)
    products = [(name, "output") for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")]
    for name, gemm in (*products, ("blockwise", "grad_weight")):
        g = getattr(recipes.get(name), gemm)
        for (m, n, k), epilogue in (((256, 512, 384), False), ((2048, 4096, 512), True), ((33, 70, 129), True)):
            yield (
                f"{name} {gemm} {m, n, k} epilogue={epilogue}",
                gemms.scaled_matmul,
                lambda g=g, m=m, n=n, k=k, e=epilogue: product(g, m, n, k, e, torch.bfloat16),
            )


def figure_cases():
    for spec in (None, "e4m3:1x32:e8m0:floor"):

        def operands(spec=spec):
            x, whole = torch.ones(2, 64, 256).bfloat16(), torch.ones(2)
            if spec is None:
                return x, whole, x[0].numel(), math.inf
            qdata, _ = reference.quantize(x, spec)
            return x, whole, x[0].numel(), 448.0, x.float(), qdata, whole, whole.clone()

        yield f"figures {spec}", figures.operand_figures, operands


def group_cases():
    def ends():
        return torch.tensor([40, 40, 300], dtype=torch.int32)

    for name in ("rowwise", "blockwise"):
        recipe = recipes.get(name)
        rows, columns = recipe.output.lhs.args, recipe.grad_weight.rhs.args

        def both(r=rows, c=columns):
            return torch.ones(310, 512).bfloat16(), ends(), *r, *c

        def of_rows(g=recipe.output):
            x, weight = torch.ones(310, 512).bfloat16(), torch.ones(3, 256, 512).bfloat16()
            a, b = fakes.quantize_groups(x, ends(), *g.lhs.args), fakes.quantize_matrices(weight, *g.rhs.args)
            return *a, *g.lhs.args, *b, *g.rhs.args, ends(), torch.ones(3, 256)

        def of_columns(g=recipe.grad_weight):
            grad, x = (torch.ones(310, n).bfloat16() for n in (256, 512))
            a, b = (fakes.quantize_groups(y, ends(), *q.args, True) for y, q in ((grad, g.lhs), (x, g.rhs)))
            return *a, *g.lhs.args, *b, *g.rhs.args, ends(), None, torch.float32, "precise", False, 310

        yield f"groups {name} casts", casts.quantize_groups_both, both
        yield f"groups {name} rows", gemms.scaled_grouped_matmul, of_rows
        yield f"groups {name} columns", gemms.scaled_grouped_matmul, of_columns
    yield "sums of groups", casts.grouped_sum, lambda: (torch.ones(310, 512), ends())


def product(gemm, m, n, k, epilogue, out):
    a, b = torch.ones(m, k), torch.ones(n, k)
    qa, qb = fakes.quantize(a, *gemm.lhs.args), fakes.quantize(b, *gemm.rhs.args)
    extra = (torch.ones(n), "gelu", torch.ones(m, n)) if epilogue else (None, None, None)
    return (*qa, *gemm.lhs.args, *qb, *gemm.rhs.args, *extra, out, "precise")


@contextlib.contextmanager
def plain_launches():
    """As with a Triton whose private names are not known."""
    before = executor._plans, triton_private.MISSING
    executor._plans, triton_private.MISSING = {}, ("a name",)
    executor._warned.add("a name")
    yield
    executor._plans, triton_private.MISSING = before


def compare(label, function, sets):
    """Whether the plain launch on one set of arguments and a replay on another agree, and whether it was a replay."""
    names = [{f"argument {i}": a for i, a in enumerate(args) if isinstance(a, torch.Tensor)} for args in sets]
    # The second call makes what repeats it.
    for _ in range(2):
        function(*sets[0])
    described()
    with plain_launches():
        expected = launched(lambda: function(*sets[1]), names[1])
    before = len(executor._plans)
    actual = launched(lambda: function(*sets[2]), names[2])
    replayed = len(executor._plans) == before and all(found.repeat for found in executor._plans.values())
    if actual != expected:
        print("DIFFERENT", label, expected, actual, sep="\n")
    else:
        print("same", label, len(expected[0]), "launches", "replayed" if replayed else "not replayed")
    return actual == expected, replayed


def main():
    warnings.simplefilter("error")
    wanted = sys.argv[1:] or [""]
    results = [
        compare(label, function, [make() for _ in range(3)])
        for label, function, make in (*cases(), *figure_cases(), *group_cases())
        if any(text in label for text in wanted)
    ]
    different = sum(not same for same, _ in results)
    print(f"{sum(replayed for _, replayed in results)} replayed, {different} different")
    sys.exit(different > 0)


main()
