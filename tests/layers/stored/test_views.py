"""Writes to a stored weight reach its codes or are an error: by views, by `.data`, and by all of torch.nn.init."""

import copy
import inspect

import pytest
import torch
from cases import QUANTIZED, normal
from stored_layers import spec_of
from torch import nn

from tritonfp8.layers.stored import StoredWeight, store
from tritonfp8.specs.testing import assert_bitwise_equal

each_use = pytest.mark.parametrize("requires_grad", [False, True], ids=["frozen", "trained"])
N, K = 40, 64
# Values that every recipe keeps, so that plain and stored weights stay equal.
EXACT = torch.randint(-4, 5, (N, K), generator=torch.Generator().manual_seed(0)).float()


def weight(values=EXACT, requires_grad=False, recipe="rowwise"):
    return nn.Parameter(store(values.clone(), spec_of(recipe)), requires_grad)


def assigned(w, values):
    w.data = values


WRITES = {
    "view(-1)": lambda w: w.view(-1).zero_(),
    "flatten()[...]": lambda w: w.flatten().__setitem__(slice(3, 9), 2.0),
    "reshape": lambda w: w.reshape(K, N).mul_(0.5),
    "a row": lambda w: w[3].fill_(4.0),
    "rows": lambda w: w[3:7].copy_(torch.ones(4, K)),
    "elements": lambda w: w.__setitem__((torch.tensor([1, 5]), 2), 0.0),
    "narrow": lambda w: w.narrow(1, 8, 16).neg_(),
    "transposed": lambda w: w.T[5].zero_(),
    "diagonal": lambda w: w.diagonal().fill_(1.0),
    "a view of a view": lambda w: w.view(-1)[10:20].view(2, 5)[1].zero_(),
    "data": lambda w: assigned(w, torch.arange(float(K)).remainder(4).expand(N, K)),
    "vector_to_parameters": lambda w: nn.utils.vector_to_parameters(torch.ones(N * K), [w]),
}


@each_use
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("write", WRITES)
def test_a_write_reaches_the_codes(write, recipe, requires_grad):
    stored, plain = weight(requires_grad=requires_grad, recipe=recipe), nn.Parameter(EXACT.clone(), requires_grad)
    with torch.no_grad():
        WRITES[write](stored)
        WRITES[write](plain)
    assert not torch.equal(plain, EXACT)
    assert type(stored) is StoredWeight
    assert_bitwise_equal([stored.dequantize()], [plain.detach()])


def test_a_view_follows_the_weight_and_reads_as_a_plain_one():
    stored = weight()
    flat, part = stored.view(-1), stored[4:8]
    with torch.no_grad():
        stored.zero_()
        stored[5].fill_(2.0)
    plain = torch.zeros(N, K)
    plain[5] = 2.0
    assert (flat.shape, flat.dtype, flat.is_contiguous()) == ((N * K,), torch.float32, True)
    assert_bitwise_equal([flat + 0, torch.cat([flat])], [plain.view(-1)] * 2)
    x = normal(3, K)
    assert_bitwise_equal([nn.functional.linear(x, part)], [nn.functional.linear(x, plain[4:8])])
    assert type(flat.clone()) is torch.Tensor
    assert "ValuesView((2560,)" in repr(flat)


def test_a_write_that_a_copy_would_swallow_is_an_error():
    stored = weight()
    for write in (lambda: stored.split(8)[0].zero_(), lambda: stored.unbind()[0].zero_()):
        with pytest.raises(NotImplementedError, match="stored in 8 bits"):
            write()
    with pytest.raises(ValueError, match=r"the data of a stored weight \(40, 64\) must keep its shape"):
        stored.data = torch.zeros(K, N)
    assert_bitwise_equal([stored.dequantize()], [EXACT])


INITIALIZATIONS = {
    name: function
    for name, function in vars(nn.init).items()
    if inspect.isfunction(function) and name.endswith("_") and not name.startswith("_")
}
ARGUMENTS = {"constant_": (0.5,), "sparse_": (0.1,)}
# They take a weight of 3 dims or more, and make a tensor of their own from the weight.
REFUSED = {"dirac_": ValueError, "orthogonal_": NotImplementedError}
# It draws again where a rounded value lies outside of the bounds.
DRAWS_AGAIN = {"trunc_normal_"}
# Older versions of torch compute it in several steps, between which a stored weight would be rounded.
STEPWISE = "erfinv_" in inspect.getsource(nn.init._no_grad_trunc_normal_)
REFUSED |= dict.fromkeys(DRAWS_AGAIN, NotImplementedError) if STEPWISE else {}


@each_use
@pytest.mark.parametrize("name", INITIALIZATIONS)
def test_an_initialization_is_that_of_a_plain_weight_or_changes_nothing(name, requires_grad):
    stored, plain = weight(requires_grad=requires_grad), nn.Parameter(EXACT.clone(), requires_grad)
    initialize, arguments = INITIALIZATIONS[name], ARGUMENTS.get(name, ())
    if name in REFUSED:
        with pytest.raises(REFUSED[name]):
            initialize(stored, *arguments)
        # The first step of several has drawn values.
        assert torch.equal(stored.dequantize(), EXACT) is not (STEPWISE and name in DRAWS_AGAIN)
        return
    for each in (stored, plain):
        torch.manual_seed(3)
        assert initialize(each, *arguments) is each
    if name not in DRAWS_AGAIN:
        assert_bitwise_equal([stored.dequantize()], [store(plain.detach(), spec_of()).dequantize()])


@pytest.mark.skipif(STEPWISE, reason="an error with this torch")
@pytest.mark.parametrize(("std", "bound"), [(1.0, 2.0), (4.0, 0.5)], ids=["rejected", "uniform"])
def test_truncated_normal_values(std, bound):
    stored, plain = weight(torch.zeros(256, 256)), torch.empty(256, 256)
    torch.manual_seed(3)
    nn.init.trunc_normal_(stored, std=std, a=-bound, b=bound)
    nn.init.trunc_normal_(plain, std=std, a=-bound, b=bound)
    values = stored.dequantize()
    assert values.abs().max() <= bound
    # Values up to half a spacing beyond the bound are rounded to it, and stay.
    assert values.std().item() == pytest.approx(plain.std().item(), rel=0.03)
    assert values.mean().abs() < 0.02


def test_addresses_tell_weights_apart_and_torch_copies_them():
    first, second = weight(), weight()
    assert len({first.data_ptr(), second.data_ptr(), 0}) == 3
    assert first.data_ptr() == first._qdata.data_ptr()
    copied = copy.deepcopy(first)
    assert copied.data_ptr() != first.data_ptr()
    assert_bitwise_equal([copied.dequantize()], [EXACT])
