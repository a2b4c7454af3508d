"""The registered ops: schema, fake, CPU and CUDA implementations, and the count of products."""

import dataclasses
import inspect

import pytest
import torch
from cases import SPECS, banded, cpu_and_cuda, normal
from op_samples import MATMUL_PAIRS, ROW, SAMPLES, matmul_args
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tritonfp8
from tritonfp8 import ops, reference
from tritonfp8.compat import counting
from tritonfp8.compat.counting import count_gemms
from tritonfp8.launch import gemms
from tritonfp8.specs import BLOCK_1X32
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(3)

LAUNCHED = [name for name, op in ops.OPS.items() if op.reference is not None]


WRITTEN = {
    "quantize_into": ["qdata", "scale"],
    "quantize_at_random": ["qdata", "scale"],
    "amax_of_shards": ["amaxes"],
    "quantize_shards": ["out"],
    "sum_in_pairs": ["out"],
    "adamw": ["qdata", "scale", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale"],
}


def parted(op, args):
    """The tensors among ``args`` that the op writes to, and the others."""
    flags = [argument.is_write for argument in op._schema.arguments]
    return [tensors([x for x, flag in zip(args, flags, strict=False) if flag == which]) for which in (True, False)]


def as_list(results):
    return list(results) if isinstance(results, (tuple, list)) else [results] if results is not None else []


def tensors(args):
    return [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]


def mapped(function, args):
    """``args``, lists too, with ``function`` of each tensor."""
    return tree_map_only(torch.Tensor, function, args)


each_sample = pytest.mark.parametrize("i", range(len(SAMPLES)), ids=lambda i: f"{i}-{SAMPLES[i][0]._opname}")


def on(device, i):
    op, args = SAMPLES[i]
    flags, args = [a.is_write for a in op._schema.arguments], mapped(lambda x: x.to(device), args)
    return op, tuple(x.clone() if flag and x is not None else x for x, flag in zip(args, flags, strict=False))


def test_samples_cover_all_ops():
    assert {op._opname for op, _ in SAMPLES} == set(LAUNCHED)


@cpu_and_cuda
@each_sample
def test_opcheck(device, i):
    op, args = on(device, i)
    checks = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    # It compares inputs before and after by allclose, which has no 8-bit floats: the test below compares their bytes.
    if not any(x.element_size() == 1 for x in tensors(args)):
        checks.append("test_schema")
    outcome = torch.library.opcheck(op, args, test_utils=checks)
    assert outcome == dict.fromkeys(checks, "SUCCESS")


@cpu_and_cuda
@each_sample
def test_inputs_are_not_written_and_not_returned(device, i):
    op, args = on(device, i)
    if op._opname in WRITTEN:
        op(*args)
        assert_bitwise_equal(parted(op, args)[1], parted(op, on(device, i)[1])[1])
        return
    before = [x.clone() for x in tensors(args)]
    results = op(*args)
    assert_bitwise_equal(tensors(args), before)
    for result in as_list(results):
        storage = result.untyped_storage().data_ptr()
        assert all(storage != x.untyped_storage().data_ptr() for x in tensors(args)) or not result.numel()


def layout(x):
    return x.dtype, x.shape, x.stride(), x.device.type


def check_fake(op, args):
    """The fake says dtype, shape, strides and device of what the op returns."""
    real = op(*args)
    with FakeTensorMode() as mode:
        fake = op(*mapped(mode.from_tensor, args))
    for got, want in zip(as_list(fake), as_list(real), strict=True):
        assert layout(got) == layout(want)


@cpu_and_cuda
@each_sample
def test_fake(device, i):
    check_fake(*on(device, i))


# Formats decide dtypes, and blocks shapes. The rounding of scales is for values only, which a fake lacks.
WITHOUT_ROUNDING = list({(spec.format, spec.block, spec.scale_format): spec for spec in SPECS}.values())


@cpu_and_cuda
@pytest.mark.parametrize("spec", WITHOUT_ROUNDING, ids=str)
def test_fake_of_casts(device, spec):
    x = banded(130, 300).to(device)
    for layout_of_x in (x, x.t(), x[::2, 1:]):
        for transpose in (False, True):
            check_fake(ops.quantize, (layout_of_x, *spec.args, transpose))
    for spec_t in SPECS[::4]:
        check_fake(ops.quantize_both, (x, *spec.args, *spec_t.args))
    for shape in ((2, 3, 130, 40), (3, 5, 200), (2, 128, 40)):
        deep = banded(*shape).to(device)
        check_fake(ops.quantize, (deep, *spec.args))
        q = reference.quantize(deep, *spec.args)
        check_fake(ops.dequantize, (*q, *spec.args, torch.bfloat16))


@pytest.mark.parametrize("name", LAUNCHED)
def test_schema(name):
    """Plain types only; nothing is written that is not declared; every op has its twin in the reference."""
    overload = getattr(torch.ops.tritonfp8, name).default
    schema = overload._schema
    # A dtype is an int, too.
    plain = {"Tensor", "str", "int"}
    allowed = plain | {f"Optional[{kind}]" for kind in plain} | {"List[int]", "bool", "float"}
    allowed |= {"List[Tensor]"} if name in (*WRITTEN, "quantize_weights", "chain") else set()
    assert {str(argument.type) for argument in schema.arguments} <= allowed
    written = [argument.name for argument in schema.arguments if argument.is_write]
    assert written == WRITTEN.get(name, [])
    assert torch.Tag.pt2_compliant_tag in overload.tags
    assert callable(ops.OPS[name].reference)


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_reference_has_the_parameters_of_the_schema(name):
    """By name, and whether each has a default: the dispatcher leaves out what a schema has as default."""
    expected = [(argument.name, argument.has_default_value()) for argument in getattr(ops, name)._schema.arguments]
    for twin in (ops.OPS[name].reference, ops.OPS[name].launch):
        if twin is not None:
            parameters = [p for p in inspect.signature(twin).parameters.values() if p.kind is not p.KEYWORD_ONLY]
            assert [(p.name, p.default is not p.empty) for p in parameters] == expected


@pytest.mark.parametrize("name", [name for name, op in ops.OPS.items() if op.fake is not None])
def test_the_parameters_that_a_fake_names_are_the_first_of_the_schema(name):
    """Later ones it may take by their places."""
    expected = [argument.name for argument in getattr(ops, name)._schema.arguments]
    parameters = inspect.signature(ops.OPS[name].fake).parameters.values()
    named = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert named == expected[: len(named)]
    assert len(named) == len(expected) or any(p.kind is p.VAR_POSITIONAL for p in parameters)


@cpu_and_cuda
def test_defaults_of_a_product(device):
    args = matmul_args((ROW, ROW), device)
    assert args[6:] == (None, None, None, torch.bfloat16, "precise")
    expected = ops.scaled_matmul(*args)
    assert_bitwise_equal(ops.scaled_matmul(*args[:6]), expected)
    check_fake(ops.scaled_matmul, args[:6])
    for twin in (ops.OPS["scaled_matmul"].reference, gemms.scaled_matmul, tritonfp8.scaled_matmul):
        parameters = inspect.signature(twin).parameters
        for name, value in zip(("bias", "activation", "residual", "out_dtype", "accumulation"), args[6:], strict=True):
            assert parameters[name].default == value


@pytest.mark.parametrize("text", ["e4m3", "e4m3:1x128:e8m0:pow2"])
def test_unknown_spec_is_an_error(text):
    with pytest.raises(ValueError, match=f"got '{text}'"):
        ops.quantize(normal(4, 8), text)
    with pytest.raises(ValueError, match=f"got '{text}'"), FakeTensorMode():
        ops.quantize(torch.empty(4, 8), text)


@cpu_and_cuda
@each_sample
def test_op_is_the_reference(device, i):
    """On the CPU by dispatch; on CUDA the casts to the bit (what rounds by itself has tests of its own)."""
    op, args = on(device, i)
    if op._opname in WRITTEN:
        again = on(device, i)[1]
        op(*args)
        ops.OPS[op._opname].reference(*again)
        found, expected, before = (parted(op, each)[0] for each in (args, again, on(device, i)[1]))
        assert_bitwise_equal(found, expected)
        # Other outputs, such as a scale, may keep their values.
        assert not torch.equal(found[0].view(torch.uint8), before[0].view(torch.uint8))
    elif device == "cpu" or op in (ops.amax, ops.quantize, ops.quantize_both, ops.dequantize):
        assert_bitwise_equal(op(*args), ops.OPS[op._opname].reference(*args))


class TestCounting:
    def run(self):
        ops.scaled_matmul(*matmul_args((ROW, ROW), "cpu"))

    def test_products_by_kind(self):
        with count_gemms() as counts:
            self.run()
            self.run()
            ops.matmul(normal(5, 7), normal(3, 7))
        assert counts.calls == {"reference": 2, "high_precision": 1}
        assert counts.flops == {"reference": 2 * 2 * 33 * 24 * 70, "high_precision": 2 * 5 * 3 * 7}
        assert set(counts.calls) <= set(counting.KINDS)
        assert counts.share("reference") == 2 * 2 * 33 * 24 * 70 / sum(counts.flops.values())
        assert counts.share("reference", "high_precision") == 1
        assert counts.share("fp8") == 0

    def test_counts_start_empty_and_without_a_share(self):
        with count_gemms() as counts:
            pass
        assert dataclasses.asdict(counts) == {"flops": {}, "calls": {}}
        assert counts.share("reference") == 0.0

    def test_counts_nest_and_end(self):
        with count_gemms() as outer:
            self.run()
            with count_gemms() as inner:
                self.run()
            # Equal counts must not end each other.
            with count_gemms(), pytest.raises(KeyError), count_gemms():
                raise KeyError
            self.run()
        self.run()
        assert outer.calls["reference"] == 3
        assert inner.calls["reference"] == 1

    def test_a_fake_product_did_not_run(self):
        args = matmul_args((ROW, ROW), "cpu")
        with FakeTensorMode() as mode, count_gemms() as counts:
            ops.scaled_matmul(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in args))
        assert not counts.calls

    def test_compiled_products_count_when_they_run(self):
        args = matmul_args((ROW, ROW), "cpu")
        compiled = torch.compile(lambda *args: ops.scaled_matmul(*args) * 2, backend="aot_eager", fullgraph=True)
        with count_gemms() as compiling:
            compiled(*args)
        with count_gemms() as counts:
            compiled(*args)
        assert compiling.calls == counts.calls == {"reference": 1}

    @pytest.mark.gpu
    @pytest.mark.parametrize("pair", MATMUL_PAIRS, ids=lambda pair: f"{pair[0]} x {pair[1]}")
    def test_kinds_on_cuda(self, pair):
        from tritonfp8.compat import hardware

        emulated = pair[0].block == BLOCK_1X32 and not hardware.abilities("cuda").has_native_mx
        args = matmul_args(pair, "cuda")
        for rows, kind in ((64, "emulated"), (65, "dequantized")):
            a, a_scale = (x if len(x) == 1 else x[:1].expand(rows, -1).contiguous() for x in args[:2])
            with count_gemms() as counts:
                ops.scaled_matmul(a, a_scale, *args[2:])
            assert counts.calls == {kind if emulated else "fp8": 1}
