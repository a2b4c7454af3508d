"""A step of the same units has the same bits on 1, 2 and 4 ranks: gradients, their norm, and trained weights."""

import functools
import os
from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import QUANTIZED
from fsdp_cases import Setup, build, digest, zero
from fsdp_models import VOCABULARY, Llama, initialize
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tritonfp8
from tritonfp8.distributed import OrderedGradients, clip_grad_norm_
from tritonfp8.distributed.gradients.norm import _gathered, sums_of_squares

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]

UNITS, LR = 4, 1e-3


def unit(index):
    """Two sequences, the same on any number of ranks."""
    return torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(index))


def step_of(mesh, model, gradients, optimizer, number, max_norm=1.0):
    """One step; the norm of its gradients."""
    for i in range(gradients.backwards):
        loss = model(unit(number * UNITS + i * mesh.size() + mesh.get_rank()).to(mesh.device_type))
        (loss / UNITS).backward()
        gradients.add()
    gradients.finish()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def trained(mesh, setup, steps):
    """The norms of the steps, and a digest of the weights after them."""
    if mesh.device_type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    model, _ = build(mesh, setup)
    gradients = OrderedGradients(model, UNITS)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    norms = [step_of(mesh, model, gradients, optimizer, number) for number in range(steps)]
    return norms, digest(model)


def small(recipe):
    """One layer, of sizes that no number of ranks divides.

    It computes in float32: sums of a few gradients in bfloat16 are exact in float32, so no order would show.
    """
    return Setup(recipe, param_dtype=None, sizes=(42, 3, 131, 1))


LONG = ("rowwise", "blockwise", "mxfp8")


@pytest.mark.parametrize("recipe", [name for name in QUANTIZED if name not in LONG])
def test_every_recipe(ranks, recipe):
    assert ranks.run(4, trained, small(recipe), 2) == ranks.run(1, trained, small(recipe), 2) * 4


@pytest.mark.parametrize("recipe", LONG)
def test_weights_are_the_same_on_any_number_of_ranks(ranks, recipe):
    """The first norms are above the limit, so gradients are clipped, too."""
    run = functools.partial(ranks.run, function=trained, setup=small(recipe), steps=100, timeout=300)
    one, two, four = (run(world) for world in (1, 2, 4))
    norms, _ = one[0]
    assert max(norms) > 1
    assert two == one * 2
    assert four == one * 4


def without_sharding(mesh, setup, steps):
    """As :func:`trained` on one rank, without FSDP2 and in float32."""
    model = initialize(Llama(*setup.sizes))
    tritonfp8.convert(model, setup.recipe)
    gradients = OrderedGradients(model, UNITS)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    norms = [step_of(mesh, model, gradients, optimizer, number) for number in range(steps)]
    return norms, digest(model)


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_a_model_that_is_not_sharded(ranks, recipe):
    """The scale of a tensor is of one unit, or of all rows of a weight."""
    setup = replace(small(recipe), enabled=False)
    alone = ranks.run(1, without_sharding, setup, 3)
    assert ranks.run(2, trained, setup, 3) == alone * 2


def mean_of_ranks(mesh, setup, steps):
    """As :func:`trained`, by the reduce-scatter of torch and sums in the order of backwards."""
    model, _ = build(mesh, setup)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for number in range(steps):
        for i in range(UNITS // mesh.size()):
            (model(unit(number * UNITS + i * mesh.size() + mesh.get_rank())) * mesh.size() / UNITS).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def test_sums_in_another_order_have_other_bits(ranks):
    """Weights can differ: without this class they do."""
    found = {ranks.run(world, mean_of_ranks, small("rowwise"), 2)[0] for world in (1, 2, 4)}
    assert len(found) > 1


def saved(mesh, setup, folder, steps):
    """Train some steps and save model and optimizer."""
    model, _ = build(mesh, setup)
    gradients = OrderedGradients(model, UNITS)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    for number in range(steps):
        step_of(mesh, model, gradients, optimizer, number)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder, process_group=mesh.get_group())


def resumed(mesh, setup, folder, steps, done):
    """Load the checkpoint of :func:`saved`, and train the steps that are left."""
    model, _ = build(mesh, setup)
    zero(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder, process_group=mesh.get_group())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    gradients = OrderedGradients(model, UNITS)
    norms = [step_of(mesh, model, gradients, optimizer, number) for number in range(done, steps)]
    return norms, digest(model)


def test_a_run_of_four_ranks_goes_on_with_two(ranks, tmp_path):
    setup = small("mxfp8")
    norms, weights = ranks.run(1, trained, setup, 6)[0]
    ranks.run(4, saved, setup, str(tmp_path), 3)
    assert ranks.run(2, resumed, setup, str(tmp_path), 6, 3) == [(norms[3:], weights)] * 2


def compiled_steps(mesh):
    """Weights after two steps of compiled blocks."""
    return trained(mesh, replace(small("rowwise"), compile="block"), 2)


def test_compiled_blocks(ranks):
    assert ranks.run(4, compiled_steps) == ranks.run(1, compiled_steps) * 4


def sparse(mesh, order):
    """Gradients of a parameter that some units do not use, summed on one rank."""
    model = nn.ModuleDict({"always": nn.Linear(3, 1), "sometimes": nn.Linear(3, 1)})
    gradients = OrderedGradients(model, len(order))
    for i, used in enumerate(order):
        x = torch.full((1, 3), 1.0 + i)
        out = model["always"](x) + (model["sometimes"](x) if used else 0)
        out.sum().backward()
        gradients.add()
    gradients.finish()
    grad = model["sometimes"].weight.grad
    return None if grad is None else grad.tolist(), model["always"].weight.grad.tolist()


def test_a_unit_that_does_not_use_a_parameter(ranks):
    assert ranks.run(1, sparse, (True, False, False, True)) == [([[5.0] * 3], [[10.0] * 3])]
    assert ranks.run(1, sparse, (False, False)) == [(None, [[3.0] * 3])]


def local_and_whole_norm(mesh, shape, value):
    """The norms of a gradient that is sharded, and whether it is clipped as a whole one."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * value
    found = []
    for placements in ([Shard(0)], [Replicate()], None):
        parameter = nn.Parameter(distribute_tensor(x, mesh, placements) if placements else x.clone())
        parameter.grad = parameter.detach().clone()
        other = nn.Parameter(torch.ones(2))
        other.grad = torch.ones(2)
        norm = clip_grad_norm_([parameter, other], 0.5 * value).item()
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        found.append((norm, grad.tolist(), other.grad.tolist()))
    return found


@pytest.mark.parametrize("shape", [(5, 40), (7,), (3, 4, 9), (2, 3)], ids=str)
def test_a_norm_does_not_depend_on_the_shards(ranks, shape):
    for found in ranks.run(4, local_and_whole_norm, shape, 3.0):
        assert found[0] == found[1] == found[2]
        assert found[0][0] > 1.5


def gathered_rows(mesh, shapes):
    """Of gradients the sums of their rows: gathered from shards, and of whole ones."""
    whole = [torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) for shape in shapes]
    grads = [distribute_tensor(x, mesh, [Shard(0)]) for x in whole]
    found = _gathered(grads, [sums_of_squares(grad.to_local()) for grad in grads], mesh, 0)
    return [x.tolist() for x in found], [sums_of_squares(x).tolist() for x in whole]


def test_rows_are_gathered_in_order(ranks):
    """float32 would hide the order of a sum in float64."""
    for found, expected in ranks.run(4, gathered_rows, [(5, 40), (11,), (3, 4, 9), (2, 3)]):
        assert found == expected


@pytest.mark.parametrize("value", [1e-40, 1e-20, 1.0, 1e18])
def test_squares_of_any_magnitude(value):
    x = torch.randn(50, 301, generator=torch.Generator().manual_seed(4)) * value
    torch.testing.assert_close(sums_of_squares(x), x.double().square().sum(1), rtol=1e-6, atol=0)
    # In every order, and in other rows.
    assert torch.equal(sums_of_squares(x[:, torch.randperm(301)]), sums_of_squares(x))
    assert torch.equal(sums_of_squares(x[20:]), sums_of_squares(x)[20:])


def test_the_norm_of_torch_and_of_bad_gradients():
    x = nn.Parameter(torch.randn(40, 30, generator=torch.Generator().manual_seed(5)))
    x.grad = x.detach().clone()
    torch.testing.assert_close(clip_grad_norm_([x], 1.0), x.detach().norm())
    torch.testing.assert_close(x.grad.norm(), torch.tensor(1.0))
    for value in (torch.nan, torch.inf):
        x.grad[3, 4] = value
        assert not clip_grad_norm_([x], 1.0).isfinite()
    assert clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0) == 0
    with pytest.raises(ValueError, match="max_norm must not be negative; got -1"):
        clip_grad_norm_([x], -1.0)


def refusals(mesh):
    """Messages of models and orders that are refused."""
    setup, found = small("rowwise"), []

    def refused(call):
        try:
            call()
        except (RuntimeError, TypeError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("accepted")

    def sharded(**changes):
        return build(mesh, replace(setup, **changes))[0]

    model = sharded()
    refused(lambda: OrderedGradients(3, 4))
    refused(lambda: OrderedGradients(model, True))
    refused(lambda: OrderedGradients(model, 6))
    refused(lambda: OrderedGradients(model, 1))
    refused(lambda: OrderedGradients(sharded(copies=2), 4))
    refused(lambda: OrderedGradients(nn.Linear(3, 3, dtype=torch.bfloat16), 4))
    model.extra = nn.Parameter(torch.ones(3))
    refused(lambda: OrderedGradients(model, 4))
    del model.extra
    wrong = Llama(*setup.sizes)
    fully_shard(wrong, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    refused(lambda: OrderedGradients(wrong, 4))
    gradients = OrderedGradients(model, 4)
    refused(gradients.add)
    refused(gradients.finish)
    for _ in range(2):
        model(unit(0)).backward()
        gradients.add()
    refused(gradients.add)
    gradients.finish()
    model(unit(0)).backward()
    refused(gradients.add)
    columns = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    columns.grad = columns.detach().clone()
    refused(lambda: clip_grad_norm_([columns], 1.0))
    return found


def test_refusals(ranks):
    expected = (
        "TypeError",
        "TypeError: units must be an int",
        "ValueError: units and ranks must be powers of two, and no fewer units than ranks",
        "got 1 units on 2 ranks",
        "ValueError: OrderedGradients does not take HSDP",
        "ValueError: OrderedGradients needs parameters that are float32; got weight, bias",
        "ValueError: OrderedGradients needs parameters that are sharded by fully_shard; got extra",
        "ValueError: OrderedGradients needs parameters that are reduced in float32; got embed.weight",
        "RuntimeError: no parameter has a gradient: call add() after each backward",
        "RuntimeError: 0 of the 2 backwards of this rank were added",
        "RuntimeError: all 2 backwards of this rank were added",
        "RuntimeError: backward added to the sums of the step before: call optimizer.zero_grad()",
        "sharded along dim 0 over one mesh dim; got placements (Shard(dim=1),)",
    )
    for found in ranks.run(2, refusals):
        for message, part in zip(found, expected, strict=True):
            assert part in message


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", LONG)
def test_two_gpus(gpus, recipe):
    alone = gpus.run(1, trained, small(recipe), 20, timeout=300)
    assert gpus.run(2, trained, small(recipe), 20, timeout=300) == alone * 2
