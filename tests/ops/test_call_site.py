"""Call sites repeat what was planned, and leave every other call to the function of the op."""

import threading

import pytest
import torch
import triton
from cases import normal
from op_samples import SAMPLES
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tritonfp8.compat import torch_private, triton_private
from tritonfp8.compat.counting import count_gemms
from tritonfp8.launch import Plannable, executor
from tritonfp8.ops import call_site, direct
from tritonfp8.specs.testing import assert_bitwise_equal

PLANNABLE = list(direct._plannable)


class Kernel:
    """Stands for a kernel."""

    __name__ = "some_kernel"


def plan_scaled(plan, x: "View", y: "View | None", factor):  # noqa: F821  only the text of the annotations is read
    """One buffer."""
    plan.launch(Kernel, 3, (x, y), (factor,), {"SIZE": 5}, num_warps=4)
    return [plan.empty(x.shape, x.dtype)]


def scaled(x, factor=2, y=None) -> torch.Tensor:
    """The parameters of the op."""


class Site:
    """A call site of an op, whose launches and general calls are noted."""

    def __init__(self):
        self.repeated, self.general_calls = [], []
        self.call = call_site.call_site(Plannable.of(plan_scaled, scaled), self.general)

    def general(self, x, factor=2, y=None):
        self.general_calls.append((x, factor, y))
        return executor.planned(plan_scaled, (x, y), (factor,))[0]


@pytest.fixture
def site(monkeypatch):
    """Kernels that were compiled, and do nothing."""
    site = Site()

    def raw_launches(slots, calls):
        return lambda stream, addresses: site.repeated.append((calls[0].others[0], list(addresses)))

    monkeypatch.setattr(executor, "run", lambda *args, **options: "compiled")
    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(triton_private, "INTERPRETING", False)
    monkeypatch.setattr(triton_private, "MISSING", ())
    monkeypatch.setattr(triton_private, "raw_launches", raw_launches)
    monkeypatch.setattr(triton_private, "stream_getter", lambda: lambda index: 0)
    # A tensor on the CPU says that it lies on device -1.
    monkeypatch.setattr(torch_private, "current_device_getter", lambda: lambda: -1)
    made = Site()
    site.call, site.general_calls = made.call, made.general_calls
    return site


def test_the_third_call_repeats_the_plan_of_the_first(site):
    """The second one makes what repeats it."""
    x, other = normal(4, 5), normal(4, 5, seed=1)
    first = site.call(x, 3)
    site.call(x, 3)
    assert (len(site.general_calls), site.repeated) == (2, [])
    third = site.call(other, 3)
    assert len(site.general_calls) == 2
    [(factor, addresses)] = site.repeated
    assert (factor, addresses) == (3, [other.data_ptr(), None, third.data_ptr()])
    assert (third.shape, third.dtype, third.data_ptr() != first.data_ptr()) == (x.shape, x.dtype, True)


def test_layouts_that_come_once_are_not_prepared_for_repetition(site, monkeypatch):
    """The number of tokens of experts over ranks is another one in each step."""
    prepared = []
    monkeypatch.setattr(executor, "_repeat_of", lambda *args: prepared.append(args))
    for rows in (4, 5, 6, 4):
        executor.planned(plan_scaled, (normal(rows, 5), None), (3,))
    assert len(prepared) == 1


def test_a_default_is_the_op_s_and_optional_tensors_may_come(site):
    x, y = normal(4, 5), normal(4, 5, seed=1)
    for _ in range(3):
        site.call(x)
    assert [factor for factor, _ in site.repeated] == [2]
    two = Site()
    for _ in range(4):
        two.call(x, 2, y)
    assert len(two.general_calls) == 2
    assert [addresses[:2] for _, addresses in site.repeated[1:]] == [[x.data_ptr(), y.data_ptr()]] * 2


def test_an_odd_address_is_served_by_the_general_function(site):
    """The plan of the first call is for addresses that are multiples of 16."""
    odd = normal(37)[1:].view(6, 6)
    for x in (normal(6, 6), normal(6, 6), odd, odd, odd, normal(6, 6)):
        site.call(x)
    assert [x.data_ptr() % 16 > 0 for x, *_ in site.general_calls] == [False] * 2 + [True] * 3
    assert len(site.repeated) == 2
    beginning = Site()
    for x in (odd, odd, normal(6, 6)):
        beginning.call(x)
    assert len(beginning.general_calls) == 3


def test_other_configurations_are_looked_up_again(site):
    x = normal(4, 5)
    site.call(x)
    executor.forget()
    site.call(x)
    assert (len(site.general_calls), site.repeated) == (2, [])
    site.call(x)
    site.call(x)
    assert (len(site.general_calls), len(site.repeated)) == (3, 1)
    executor.forget()
    for _ in range(3):
        site.call(x)
    assert (len(site.general_calls), len(site.repeated)) == (5, 2)


def test_another_current_device_is_served_by_the_general_function(site, monkeypatch):
    devices = [-1]
    monkeypatch.setattr(torch_private, "current_device_getter", lambda: lambda: devices[0])
    other, x = Site(), normal(4, 5)
    for devices[0] in (-1, -1, -1, 1):
        other.call(x)
    assert len(other.general_calls) == 3


def test_whoever_watches_sees_each_call(site, monkeypatch):
    x = normal(4, 5)
    for _ in range(3):
        site.call(x)
    with FlopCounterMode(display=False):
        site.call(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        site.call(x)
    with count_gemms():
        site.call(x)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
        site.call(x)
    assert len(site.general_calls) == 6
    site.call(x)
    assert len(site.general_calls) == 6


def test_what_no_plan_serves_is_not_looked_up_again(site, monkeypatch):
    looked_up = []
    monkeypatch.setattr(call_site, "_look_up", lambda *args: (looked_up.append(args), True))
    x = normal(4, 5)
    for _ in range(3):
        site.call(x)
    assert (len(looked_up), len(site.general_calls)) == (1, 3)


def test_threads_share_a_site(site):
    x = normal(4, 5)
    for _ in range(2):
        site.call(x)
    thread = threading.Thread(target=site.call, args=(x,))
    thread.start()
    thread.join()
    assert len(site.repeated) == 1


@pytest.mark.parametrize("name", PLANNABLE)
def test_a_planner_has_the_names_of_the_schema(name):
    """A site finds its arguments by name. A parameter that the schema lacks is None in the calls of the op."""
    plannable = direct._plannable[name]
    tensors, others = plannable.tensors, plannable.options
    types = {a.name: str(a.real_type) for a in getattr(torch.ops.tritonfp8, name).default._schema.arguments}
    of_op = {kind: [n for n, t in types.items() if ("Tensor" in t) is kind] for kind in (True, False)}
    # Tests and the tuner give these.
    assert [n for n in tensors if n != "out"] == of_op[True]
    assert [n for n in others if n not in {"config", "tma"}] == of_op[False]


def test_every_op_whose_launch_only_runs_a_plan_has_a_planner():
    assert set(PLANNABLE) == {
        "quantize", "quantize_both", "quantize_both_sum", "quantize_with_amax", "quantize_weights", "dequantize",
        "transpose", "chain", "expand_codes", "measure_rows",
        "transpose_codes", "transpose_group_codes", "scaled_matmul", "packed_matmul", "operand_figures",
        "quantize_groups", "quantize_groups_both", "quantize_matrices", "quantize_matrices_with_amax",
        "scaled_grouped_matmul", "packed_grouped_matmul", "grouped_sum",
        "swiglu", "swiglu_backward", "swiglu_backward_amax", "sum_of_rows", "dots_of_rows",
        "exact_attention", "rms_norm", "rms_norm_backward", "row_logsumexp", "gated", "gated_backward",
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLANNABLE)
def test_a_site_returns_what_the_op_does(name):
    """New tensors of the same layouts in each call; each sample that a plan serves has its own site."""
    general_calls = []

    def general(*args):
        general_calls.append(args)
        return getattr(direct.CALLS, name)(*args)

    samples = [(op, args) for op, args in SAMPLES if op._opname == name and args[0].numel()]
    for op, args in samples:
        site = call_site.call_site(direct._plannable[name], general)
        for _ in range(3):
            given = tree_map_only(torch.Tensor, torch.Tensor.cuda, list(args))
            found, expected = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (site(*given), op(*given)))
            assert_bitwise_equal(found, expected)
    assert 0 < len(samples) <= len(general_calls) < 3 * len(samples)
