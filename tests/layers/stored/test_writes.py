"""Writes to a stored weight outside of an optimizer: small ones reach their expected value, and each is counted."""

import copy

import pytest
import torch
from cases import QUANTIZED, cpu_and_cuda, normal
from stored_layers import spec_of
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from trained_models import counts_of_writes, stored_model
from trained_models import values as state_of

import tritonfp8
from tritonfp8.layers.stored import StoredMatrices, StoredWeight, store
from tritonfp8.optim import DirectSteps, direct_steps, float32_copy
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = pytest.mark.one_in(2)

N, K, STEPS, SHARE = 128, 96, 300, 0.005
EXPECTED = 1 - (1 - SHARE) ** STEPS
# An element errs by a spacing of codes at most, which is 1/8 of it, and elements err independently: their mean errs by
# 1/8 over the root of their number, and five times that is not reached by chance.
BOUND = 5 / 8 / (N * K) ** 0.5

counts = pytest.fixture(counts_of_writes)


def values(model):
    return list(state_of(model).values())


def pair(recipe="rowwise", dtype=torch.float32, seed=0, device="cpu"):
    """A stored weight, and another that it is to approach."""
    torch.manual_seed(seed)
    return [nn.Parameter(store(torch.randn(N, K, dtype=dtype).to(device), spec_of(recipe))) for _ in range(2)]


def soft_update(w, target):
    w.data.mul_(1 - SHARE)
    w.data.add_(SHARE * target.data)


WRITES = {
    "lerp_": lambda w, target: w.lerp_(target, SHARE),
    "mul_, add_": lambda w, target: w.mul_(1 - SHARE).add_(target, alpha=SHARE),
    "soft target update": soft_update,
    "foreach": lambda w, target: torch._foreach_lerp_([w], [target], SHARE),
    "a view": lambda w, target: w.view(-1).lerp_(target.view(-1), SHARE),
    "merged models": lambda w, target: w.sub_((w.detach() - target) * SHARE),
}


def values_of(w):
    return w.detach().plain_values().float()


@torch.no_grad()
def repeat(write, *weights):
    for _ in range(STEPS):
        write(*weights)


def check_moves(write, w, target):
    """Writes that are repeated lead as far towards ``target`` as in high precision."""
    start, end = values_of(w), values_of(target)
    repeat(write, w, target)
    check_moved(w, start, end)


def check_moved(w, start, end):
    way = end - start
    share = ((values_of(w) - start) * way).sum().item() / way.square().sum().item()
    assert share == pytest.approx(EXPECTED, abs=BOUND)


@pytest.mark.parametrize("name", WRITES)
def test_small_writes_add_up(name):
    w, target = pair()
    end = values_of(target)
    check_moves(WRITES[name], w, target)
    assert type(w) is StoredWeight
    assert_bitwise_equal([values_of(target)], [end])


@cpu_and_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_in_every_recipe_and_dtype(recipe, dtype, device):
    check_moves(WRITES["lerp_"], *pair(recipe, dtype, device=device))


@cpu_and_cuda
def test_weights_of_experts(device):
    torch.manual_seed(0)
    made = (StoredMatrices.of(torch.randn(2, N // 2, K).to(device), spec_of("blockwise")) for _ in range(2))
    w, target = map(nn.Parameter, made)
    other = w.detach().clone()
    check_moves(WRITES["lerp_"], w, target)
    check_moves(WRITES["a view"], other, target)


def test_a_decay_by_hand():
    w, _ = pair()
    start = values_of(w)
    repeat(lambda w: w.mul_(1 - SHARE), w)
    check_moved(w, start, torch.zeros(N, K))


def test_lists_of_stored_and_plain_bfloat16_weights():
    plain, zeros = torch.ones(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    check_moves(lambda w, to: torch._foreach_lerp_([w, plain], [to, zeros], SHARE), *pair(dtype=torch.bfloat16))
    assert (plain < 1).all()


def test_replicas_that_write_alike_stay_equal():
    (first, target), (second, _) = pair(), pair()
    other, _ = pair(seed=1)
    repeat(WRITES["lerp_"], first, target)
    # What is written to another weight meanwhile changes nothing.
    repeat(lambda w, target: (other.mul_(0.99), w.lerp_(target, SHARE)), second, target)
    assert_bitwise_equal([first._qdata, first._scale], [second._qdata, second._scale])


@pytest.mark.gpu
def test_the_codes_of_a_gpu_are_those_of_a_cpu():
    found = []
    for device in ("cpu", "cuda"):
        w, target = pair("blockwise", device=device)
        with torch.no_grad():
            w.copy_(target.detach().dequantize() * 0.5)
            for _ in range(20):
                w.mul_(0.75)
        found.append([w._qdata.cpu(), w._scale.cpu()])
    assert_bitwise_equal(*found)


def test_a_write_that_is_lost_once_is_not_lost_each_time():
    """A weight so small that most writes change none of its codes."""
    torch.manual_seed(0)
    w = nn.Parameter(store(torch.full((16, 16), 1.0), spec_of("rowwise")))
    with torch.no_grad():
        for _ in range(400):
            w.mul_(1 - 2.0**-14)
    assert (w.plain_values() < 1).sum() > 10


def test_zeros_keep_their_signs():
    x = torch.tensor([[0.0, -0.0, 1.0, -1.0] * 8] * 16)
    w = nn.Parameter(store(x, spec_of("rowwise")))
    with torch.no_grad():
        w.neg_()
    assert_bitwise_equal([w.plain_values()], [x.neg()])


def test_a_frozen_copy_of_a_trained_weight_is_written_to():
    w, target = pair()
    average = copy.deepcopy(w).requires_grad_(False)
    check_moves(WRITES["lerp_"], average, target)
    with pytest.raises(NotImplementedError, match="float32_copy"):
        store(torch.ones(N, K), spec_of("rowwise")).mul_(0.5)


def test_every_write_is_counted(counts):
    w, target = pair()
    with torch.no_grad():
        w.copy_(torch.randn(N, K))
        w.copy_(target)
        w.copy_(target)
        w.mul_(1.0)
        w.view(-1)[:10].zero_()
        w.fill_(1.0)
        w.data = torch.ones(N, K)
        nn.init.normal_(w)
    assert direct_steps() == DirectSteps(writes=8, unchanged_writes=3)


def test_an_average_that_copies_make_is_seen_to_change_nothing(counts):
    w, target = pair()
    with torch.no_grad():
        for _ in range(3):
            # The sum is rounded to nearest: so small a part of the way leads back to the same code.
            w.copy_(w.dequantize() * (1 - 1e-6) + target.dequantize() * 1e-6)
    assert direct_steps() == DirectSteps(writes=3, unchanged_writes=3)


@torch.no_grad()
def test_an_averaged_model_of_stored_weights():
    model, model_2 = stored_model("rowwise"), stored_model("rowwise")
    start = values_of(model[0].weight)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(1 - SHARE))
    copies = AveragedModel(model_2, avg_fn=get_ema_avg_fn(1 - SHARE))
    for each in (average, copies):
        # The first update copies codes.
        each.update_parameters(model)
    for p in model.parameters():
        p.mul_(0.5)
    repeat(average.update_parameters, model)
    check_moved(average.module[0].weight, start, values_of(model[0].weight))
    before = copies.module[0].weight._qdata.clone()
    with pytest.raises(NotImplementedError, match=r"AveragedModel copies each average.*float32_copy\(model\)"):
        copies.update_parameters(model)
    assert_bitwise_equal([copies.module[0].weight._qdata], [before])


class TestFloat32Copy:
    def test_averages_as_a_plain_model_of_the_values(self):
        model = stored_model("tensorwise")
        average = AveragedModel(float32_copy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
        expected = [x.clone() for x in values(model)]
        for step in range(3):
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
            average.update_parameters(model)
            for x, now in zip(expected, values(model), strict=True):
                x.copy_(now) if step == 0 else x.lerp_(now, 1 - 0.9)
        assert_bitwise_equal([p.detach() for p in average.module.parameters()], expected)

    def test_keeps_recipes_and_loads_back(self):
        model = stored_model("tensorwise")
        found = float32_copy(model)
        assert {type(p) for p in found.parameters()} == {nn.Parameter}
        assert {p.dtype for p in found.parameters()} == {torch.float32}
        assert [m.recipe for m in found if hasattr(m, "recipe")] == [m.recipe for m in model if hasattr(m, "recipe")]
        x = normal(5, model[0].in_features)
        assert torch.equal(found(x), model(x))
        before = values(model)
        with torch.no_grad():
            model[0].weight.zero_()
        model.load_state_dict(found.state_dict())
        assert_bitwise_equal(values(model), before)
        assert type(model[0].weight) is StoredWeight

    def test_of_a_bfloat16_model(self):
        model = nn.Sequential(nn.Linear(64, 32), nn.LayerNorm(32)).bfloat16()
        tritonfp8.convert(model, "rowwise", mode="inference")
        before = copy.deepcopy(model)
        found = float32_copy(model)
        assert {p.dtype for p in found.parameters()} == {torch.float32}
        assert_bitwise_equal([found[0].weight.detach()], [model[0].weight.plain_values(torch.float32)])
        assert_bitwise_equal([model[0].weight._qdata], [before[0].weight._qdata])

    def test_refuses_what_is_no_module(self):
        with pytest.raises(TypeError, match=r"model must be an nn\.Module; got list"):
            float32_copy([])
