"""Grouped GEMMs of the suite: sizes of groups, the layouts that torch's kernels take, and the gate."""

import itertools

import pytest
import torch

from bench.contest import gates, grouped
from bench.contest.gates import Part
from bench.shapes import SMOKE, select
from bench.suites import test_grouped as suite
from tritonfp8.specs.testing import FAST_SQNR

CPU = torch.device("cpu")
# FP8 codes in 16 bytes.
ALIGNED = 16
ON_META = torch._scaled_grouped_mm


def sizes(*args):
    return [end - start for start, end in itertools.pairwise([0, *grouped.group_ends(*args)])]


@pytest.mark.parametrize("shape", select("grouped"), ids=str)
@pytest.mark.parametrize("distribution", grouped.DISTRIBUTIONS)
def test_groups_have_all_rows(shape, distribution):
    rows, groups, *_ = shape.size
    for problem in (grouped.Output, grouped.GradWeight):
        found = sizes(distribution, rows, groups, problem.multiple)
        assert len(found) == groups
        assert sum(found) == rows
        assert min(found) >= 0
        assert not any(size % problem.multiple for size in found)


def test_distributions_are_what_they_are_called():
    assert sizes(grouped.UNIFORM, 64, 4) == [16] * 4
    assert sizes(grouped.ONE, 64, 4) == [0, 0, 64, 0]
    zipf, empty = (sizes(name, 32768, 32) for name in (grouped.ZIPF, grouped.EMPTY))
    assert max(zipf) > 20 * min(zipf) > 0
    assert sorted(zipf) != zipf != sorted(zipf, reverse=True)
    assert [group for group, size in enumerate(empty) if not size] == [16]
    # Every process has the same ones.
    assert sizes(grouped.ZIPF, 100, 4) == sizes(grouped.ZIPF, 100, 4)


def scaled_grouped_mm(a, b, a_scale, b_scale, *, offs, out_dtype, use_fast_accum):
    """``torch._scaled_grouped_mm`` on a CPU, after its checks of layouts, and with what its kernels assert."""
    operands = [x.to("meta") for x in (a, b, a_scale, b_scale)]
    out = torch.full(ON_META(*operands, offs=offs.to("meta"), out_dtype=out_dtype).shape, torch.nan)
    bounds = list(itertools.pairwise([0, *offs.tolist()]))
    for group, (start, end) in enumerate(bounds):
        if b.ndim == 3:
            lhs, rhs = a[start:end].float() * a_scale[start:end, None], b[group].float() * b_scale[group]
            out[start:end] = lhs @ rhs
        else:
            assert end > start
            assert end % ALIGNED == 0
            of_a, of_b = (scale.view(len(bounds), -1)[group] for scale in (a_scale, b_scale))
            out[group] = (a[:, start:end].float() * of_a[:, None]) @ (b[start:end].float() * of_b)
    return out.to(out_dtype)


@pytest.mark.parametrize("case", grouped.PRODUCTS, ids=str)
def test_contenders_and_peers_compute_the_same_gemms(monkeypatch, case):
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    (shape,) = select("grouped", [SMOKE])
    problem = case.problem(shape, case.distribution, CPU)
    for contender in suite.contenders_of(problem):
        contender.check(contender.make()())
    # The operands of bf16 are not quantized, so the noise of FP8 is between them.
    found = problem.bf16()()
    for part in problem.parts_of_peer():
        gates.close_gemm(part.product, "fast", fast=20)(found[part.place])


def test_quick_measures_each_distribution_and_each_shape():
    pairs = [(case, shape) for shape in select("grouped") for case in grouped.PRODUCTS if case.serves(shape.set)]
    found = {pair for pair in pairs if suite.is_quick(*pair)}
    assert {shape for _, shape in found} == set(select("grouped"))
    assert {case for case, _ in found} == set(grouped.PRODUCTS)
    assert len(found) < len(pairs) * 0.6
    case, (shape,) = grouped.PRODUCTS[0], select("grouped", [SMOKE])
    contenders = suite.contenders_of(case.problem(shape, case.distribution, CPU))
    assert all(suite.is_chosen(c, case, shape) for c in contenders)
    chosen = [c.name for c in contenders if suite.is_chosen(c, grouped.PRODUCTS[2], shape)]
    assert sorted(chosen) == sorted(suite.QUICK_CONTENDERS)


@pytest.mark.parametrize("accumulation", ["precise", "fast"])
def test_the_gate_sees_one_wrong_group(accumulation):
    products = [torch.randn(6, 128) for _ in range(3)]
    actual = torch.cat(products).bfloat16()
    check = gates.close_groups(
        lambda: (Part(i, slice(6 * i, 6 * i + 6), product, 64) for i, product in enumerate(products)), accumulation
    )
    check(actual)
    actual[8, :16] = 0
    with pytest.raises(AssertionError, match="group 1"):
        check(actual)


def test_the_gate_sees_what_is_not_zero_in_a_group_without_rows():
    product = torch.randn(64, 64)
    actual = torch.stack([product, torch.zeros(64, 64)]).bfloat16()
    check = gates.close_groups(lambda: [Part(0, 0, product, 64)], "precise", lambda result: iter(result[1:]))
    check(actual)
    actual[1, 3, 5] = torch.nan
    with pytest.raises(AssertionError, match="not zero"):
        check(actual)


def test_fast_sums_over_many_rows_may_lose_more():
    product = torch.randn(128, 128)
    noisy = product + product.std() * 10 ** (-(FAST_SQNR - 4) / 20) * torch.randn_like(product)

    def check(depth):
        gates.close_groups(lambda: [Part(0, slice(None), product, depth)], "fast")(noisy)

    check(2 * gates.FAST_DEPTH)
    with pytest.raises(AssertionError):
        check(gates.FAST_DEPTH)
