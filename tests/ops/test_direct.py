"""Code that Inductor writes calls the functions of the ops, without torch's dispatcher."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from cases import cpu_and_cuda
from op_samples import SAMPLES, chain_args
from torch._dynamo.utils import counters
from torch._inductor.codegen import custom_extern_kernel_codegen
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tritonfp8 import ops
from tritonfp8.compat import inductor_private
from tritonfp8.compat.counting import count_gemms
from tritonfp8.ops import direct
from tritonfp8.ops.passes import chains
from tritonfp8.specs.testing import assert_bitwise_equal

DISPATCHED = re.compile(r"^ *(?:\w+ = )?torch\.ops\.tritonfp8\.(\w+)", re.MULTILINE)
CALLED = re.compile(r"tritonfp8_calls\.(\w+)\(")
AT_SITES = re.compile(r"^(tritonfp8_site_\d+) = tritonfp8_site\('(\w+)'\)", re.MULTILINE)
SPEC = "e4m3:rowwise:fp32:pow2"
# Not ops: functions that compiled graphs call in place of ops.
IN_PLACE = {"swiglu_backward_", "swiglu_backward_amax_"}


def tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def called(code):
    """The names of the ops whose functions the code calls, with a site or without. It calls each site once."""
    sites = AT_SITES.findall(code)
    assert all(len(re.findall(rf"\b{site}\(", code)) == 1 for site, _ in sites)
    return [name for _, name in sites] + CALLED.findall(code)


def compiled(function, *args, dynamic=None, **options):
    """What a compiled function returns, and the code that Inductor wrote for it."""
    torch.compiler.reset()
    with torch._inductor.config.patch(force_disable_caches=True, **options):
        result, code = run_and_get_code(torch.compile(function, fullgraph=True, dynamic=dynamic), *args)
    return result, "\n".join(code)


@pytest.fixture(autouse=True)
def unchained(monkeypatch):
    """Each op is a call of its own."""
    monkeypatch.setattr(chains, "MOST_WORK", 0)


@pytest.fixture
def registry():
    """Inductor's table of code for ops, with our functions; put back after the test."""
    table = custom_extern_kernel_codegen.CUSTOM_EXTERN_KERNEL_CODEGEN
    assert inductor_private.call_directly(direct._calls, direct._IMPORT)
    before = dict(table)
    yield table
    table.clear()
    table.update(before)


def product(x, y):
    a, a_scale = ops.quantize(x, SPEC)
    b, b_scale = ops.quantize(y, SPEC)
    # The dtype is left out, the argument after it is not.
    return ops.scaled_matmul(a, a_scale, SPEC, b, b_scale, SPEC, accumulation="fast")


def operands(device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, 64, generator=generator).bfloat16().to(device) for rows in (40, 24)]


@pytest.mark.parametrize("i", range(len(SAMPLES)), ids=lambda i: f"{i}-{SAMPLES[i][0]._opname}")
def test_a_function_returns_and_writes_what_its_op_does(i):
    op, args = SAMPLES[i]
    ours, theirs = (tree_map_only(torch.Tensor, torch.clone, list(args)) for _ in range(2))
    found, expected = getattr(direct.CALLS, op._opname)(*ours), op(*theirs)
    assert_bitwise_equal(tensors([found, ours]), tensors([expected, theirs]))


def test_every_op_has_a_function():
    not_composite = {name for name, op in ops.OPS.items() if op.fake is not None}
    # The core does not import what implements it.
    assert {*vars(direct.CALLS)} - IN_PLACE | {"gathered_operand", "gathered_matrices"} == not_composite


@cpu_and_cuda
@pytest.mark.slow
def test_compiled_code_calls_every_op_directly_to_the_same_bits(registry, device):
    """A sample of each op in one graph, and the same graph through the dispatcher."""
    calls = [(op, args) for op, args in SAMPLES if not op._schema.is_mutable and all(x.numel() for x in tensors(args))]
    chosen = {op: tree_map_only(torch.Tensor, lambda x: x.to(device), args) for op, args in reversed(calls)}
    names = {op._opname for op in chosen}

    def run(inputs):
        return [op(*args) for op, args in zip(chosen, inputs, strict=True)]

    straight, code = compiled(run, list(chosen.values()))
    assert (set(called(code)), DISPATCHED.findall(code)) == (names, [])
    with direct.through_the_dispatcher():
        dispatched, code = compiled(run, list(chosen.values()))
    assert (called(code), set(DISPATCHED.findall(code))) == ([], names)
    assert_bitwise_equal(tensors(straight), tensors(dispatched))
    _, code = compiled(product, *operands())
    assert called(code)


def test_an_op_that_writes_is_called_directly():
    op, args = next((op, args) for op, args in SAMPLES if op is ops.amax_of_shards)
    expected = args[0].clone()
    op(expected, *args[1:])

    def run(out, *rest):
        op(out, *rest)
        return out + 0

    found, code = compiled(run, args[0].clone(), *args[1:])
    assert (called(code), DISPATCHED.findall(code)) == (["amax_of_shards"], [])
    assert_bitwise_equal([found], [expected])


@cpu_and_cuda
def test_defaults_are_left_out_at_the_end_and_written_in_the_middle(device):
    expected = product(*operands(device))
    found, code = compiled(product, *operands(device))
    assert_bitwise_equal([found], [expected])
    assert "tritonfp8_site_0(arg0_1, 'e4m3:rowwise:fp32:pow2')" in code
    assert re.search(r"tritonfp8_site_2\(.*, None, None, None, None, 'fast'\)", code)


def test_sizes_that_change_have_no_site():
    """A site is for tensors that always have the same layouts."""
    _, code = compiled(product, *operands(), dynamic=True)
    assert (AT_SITES.findall(code), called(code)) == ([], ["quantize", "quantize", "scaled_matmul"])


def test_an_argument_after_defaults_in_the_middle_is_kept():
    """Inductor names the arguments that the graph left out, and those after them."""
    op = ops.scaled_matmul
    left_out = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    given = left_out | {"accumulation": "fast"}
    node = SimpleNamespace(
        op_overload=op, kwargs=given, codegen_args=lambda: ["a", "s", "'x'", "b", "t", "'y'"],
        codegen_kwargs=lambda: [f"{name}={value!r}" for name, value in given.items()],
    )  # fmt: skip
    assert inductor_private.positional(node)[6:] == ["None", "None", "None", "None", "'fast'"]
    given["accumulation"] = "precise"
    assert inductor_private.positional(node) == node.codegen_args()


def test_the_code_imports_what_it_calls():
    """Torch keeps the code on disk, and runs it in processes that compile nothing."""
    _, code = compiled(product, *operands())
    (line,) = [line for line in code.splitlines() if "import CALLS" in line]
    names = {}
    exec(line, names)
    assert names["tritonfp8_calls"] is direct.CALLS


def test_the_hash_of_the_code_changes_with_a_module_of_any_folder(tmp_path):
    """Torch would go on with a graph that it kept on disk from before a change in a folder that is not read."""
    shutil.copytree(direct.PACKAGE, tmp_path / "tritonfp8", ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted((tmp_path / "tritonfp8").rglob("*.py"))
    before = direct.digest(files)
    assert before == direct.CODE
    for folder in {path.parent for path in files}:
        changed = next(path for path in files if path.parent == folder)
        text = changed.read_text()
        changed.write_text(text + "\n")
        assert direct.digest(files) != before, changed
        changed.write_text(text)
    assert direct.digest(files) == before


def test_graphs_on_disk_are_of_this_code_only(tmp_path, monkeypatch):
    """Code of another version of the package may call functions that it no longer has."""

    def hits():
        torch.compiler.reset()
        counters.clear()
        torch.compile(lambda x: ops.quantize(x, SPEC), fullgraph=True)(operands()[0])
        return counters["inductor"]["fxgraph_cache_hit"]

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch.compiler.config.patch(cache_key_tag="mine"):
        assert [hits(), hits()] == [0, 1]
        monkeypatch.setattr(direct, "CODE", "of another version")
        assert [hits(), hits()] == [0, 1]
        assert torch.compiler.config.cache_key_tag.startswith("mine ")


@pytest.mark.parametrize("name", ["CustomCodegen", "CUSTOM_EXTERN_KERNEL_CODEGEN"])
def test_a_torch_without_the_table_calls_through_the_dispatcher(registry, monkeypatch, name):
    registry.clear()
    monkeypatch.delattr(custom_extern_kernel_codegen, name)
    assert inductor_private.call_directly(direct._calls, direct._IMPORT) is False
    found, code = compiled(product, *operands())
    assert (called(code), len(DISPATCHED.findall(code))) == ([], 3)
    assert_bitwise_equal([found], [product(*operands())])


def test_inductor_is_told_once_and_only_if_it_is_loaded(monkeypatch):
    told = []
    monkeypatch.setattr(direct, "_is_offered", False)
    monkeypatch.setattr(inductor_private, "call_directly", lambda *args: told.append(args))
    fake = direct.offered(lambda x: x + 1)
    monkeypatch.setattr(inductor_private, "_COMPILER", "no.such.module")
    assert (fake(1), told) == (2, [])
    monkeypatch.setattr(inductor_private, "_COMPILER", "torch")
    assert (fake(1), fake(2), len(told)) == (2, 3, 1)


def test_profilers_flop_counters_and_counts_see_compiled_gemms():
    function = torch.compile(product)
    function(*operands())
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function(*operands())
    assert {"tritonfp8::quantize", "tritonfp8::scaled_matmul"} <= {event.key for event in seen.key_averages()}
    with FlopCounterMode(display=False) as counter:
        function(*operands())
    assert counter.get_total_flops() == 2 * 40 * 24 * 64
    with count_gemms() as counts:
        function(*operands())
    assert sum(counts.flops.values()) == 2 * 40 * 24 * 64


def test_profilers_flop_counters_and_counts_see_the_ops_of_a_chain():
    x, others, text = chain_args(*operands())
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        direct.CALLS.chain(x, others, text)
    keys = {event.key for event in seen.key_averages()}
    assert {"tritonfp8::quantize", "tritonfp8::scaled_matmul"} <= keys
    assert "tritonfp8::chain" not in keys
    with FlopCounterMode(display=False) as counter:
        direct.CALLS.chain(x, others, text)
    assert counter.get_total_flops() == 2 * 40 * 24 * 64
    with count_gemms() as counts:
        direct.CALLS.chain(x, others, text)
    assert sum(counts.flops.values()) == 2 * 40 * 24 * 64


@pytest.mark.slow
def test_code_in_cpp_calls_the_ops():
    # Headers compiled in advance take longer than what one program saves by them.
    options = {"cpp_wrapper": True, "cpp_cache_precompile_headers": False}
    found, code = compiled(lambda x: ops.quantize(x, SPEC), operands()[0], **options)
    assert "tritonfp8_calls" not in code
    assert_bitwise_equal(list(found), list(ops.quantize(operands()[0], SPEC)))
