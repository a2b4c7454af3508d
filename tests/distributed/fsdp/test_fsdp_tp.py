"""FSDP2 with FP8 all-gather on top of tensor parallelism: the scales of the whole weight, the losses without it."""

import functools
import math

import pytest
import torch
from cases import QUANTIZED
from fsdp_cases import BFLOAT16, both_operands, operand_of, zero
from fsdp_models import Linears, Llama, initialize
from fsdp_tp_cases import LAYERS, TWO_BY_TWO, build, mesh_of, part_of, tokens_of, train
from process_group import Processes
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather
from tritonfp8.distributed.shard_layout import largest_blocks

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(4)]

# Replicas, ranks of FSDP2, of tensor parallelism.
HYBRID, HYBRID_OF_FOUR = (2, 2, 2), (2, 1, 2)


@pytest.fixture(scope="module")
def eight():
    processes = Processes(8)
    yield processes
    processes.stop()


@pytest.fixture
def four_gpus(gpus):
    if gpus.size < 4:
        pytest.skip("needs four CUDA GPUs")
    return gpus


# Plain FSDP2 gives the same bits with and without these on a CPU, so one run of it stands for all of them.
LEAVE_FSDP2_ALONE = {"enable", "reshard", "first", "recompute"}


def off_on_gpus(processes, sizes, **options):
    """A run without the FP8 all-gather."""
    return processes.run(math.prod(sizes), train, sizes=sizes, enabled=False, **options)


@pytest.fixture(scope="module")
def off():
    """Runs without the FP8 all-gather, each made once."""
    run = functools.cache(off_on_gpus)

    def find(processes, **options):
        return run(processes, **{name: value for name, value in options.items() if name not in LEAVE_FSDP2_ALONE})

    return find


def check_equal_to_off(ranks, off, sizes, recipe, steps=3, **options):
    options |= {"sizes": sizes, "recipe": recipe, "steps": steps}
    assert ranks.run(math.prod(sizes), train, enabled=True, **options) == off(ranks, **options)


@pytest.mark.parametrize("enable", ["before_parallel", "last"])
def test_it_is_enabled_before_tensor_parallelism_or_after_everything(ranks, off, enable):
    check_equal_to_off(ranks, off, TWO_BY_TWO, "blockwise", steps=2, layers=1, enable=enable)


# The second step is the first that gathers what the optimizer changed. test_fsdp.py takes ten.
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_tp_by_fsdp2(ranks, off, recipe):
    check_equal_to_off(ranks, off, TWO_BY_TWO, recipe, 2)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_tp_by_hsdp(request, off, recipe):
    """Each replica has shards as in the test above, and so their scales: eight ranks show it with one recipe."""
    ranks, sizes = ("eight", HYBRID) if recipe == "blockwise" else ("ranks", HYBRID_OF_FOUR)
    check_equal_to_off(request.getfixturevalue(ranks), off, sizes, recipe, 2, layers=1)


OPTIONS = {
    "DTensor outputs": {"local": False},
    "no reshard": {"reshard": False},
    "converted last": {"first": False},
    "recompute": {"recompute": "yes"},
    "evaluated": {"evaluates": True},
    "one rank of FSDP2": {"sizes": (1, 4)},
}


# Whether weights are resharded decides which orientations are gathered, and that differs by recipe. The other options
# meet shards and blocks: a weight of one orientation in blocks, or of two in rows.
CASES = [
    ("no reshard", "rowwise"),
    ("no reshard", "blockwise"),
    ("DTensor outputs", "blockwise"),
    ("converted last", "rowwise"),
    ("recompute", "rowwise"),
    ("evaluated", "rowwise"),
    ("one rank of FSDP2", "blockwise"),
]


@pytest.mark.parametrize(("option", "recipe"), CASES)
def test_option(ranks, off, option, recipe):
    # The gathers of several layers overlap in the tests above.
    options = {"sizes": TWO_BY_TWO, "layers": 1, **OPTIONS[option]}
    check_equal_to_off(ranks, off, recipe=recipe, steps=2, **options)


def test_compiled_layer(ranks, off):
    """Ranks whose shards start inside blocks and ranks whose shards do not have the same collectives in each graph.

    The layer is the MLP: test_tensor_parallel.py and test_fsdp.py compile attention.
    """
    options = {"compiled": 1, "layers": 1, "attention": False, "timeout": 240}
    check_equal_to_off(ranks, off, TWO_BY_TWO, "blockwise", steps=2, **options)


CHANGES = {
    "load": lambda model, other: model.load_state_dict(other),
    "assign": lambda model, other: model.load_state_dict(other, assign=True),
    "data": lambda model, other: [p.data.mul_(1.7) for p in model.parameters()],
    "swap": lambda model, other: tritonfp8.swap_recipe(model, "blockwise"),
    "revert": lambda model, other: tritonfp8.revert(model),
}


def after_changes(world_mesh, enabled):
    """Of each change of the weights: the losses before and after it, and the bytes of a step's all-gathers."""
    model, dp = build(world_mesh, TWO_BY_TWO, "rowwise", enabled, layers=1)
    found = {}
    for name, change in CHANGES.items():
        # Weights that only grew would make losses so large that recipes do not differ.
        factor = 1 / 1.7 if name == "assign" else 1.7
        other = {key: value * factor for key, value in model.state_dict().items()}
        before = model(tokens_of(0, dp)).item()
        with torch.no_grad():
            # After a forward without backward FSDP keeps the root's gathered weights until a reshard.
            model.reshard()
            change(model, other)
        with count_collective_bytes() as counted:
            after = model(tokens_of(0, dp))
            after.backward()
        found[name] = (before, after.item()), counted.bytes["all_gather"]
    return found


def test_scales_are_never_stale(ranks):
    """By changes of the weights or of the recipe, one after the other on one model."""
    on, off = (ranks.run(4, after_changes, enabled=enabled) for enabled in (True, False))
    for mine, theirs in zip(on, off, strict=True):
        assert mine.keys() == theirs.keys() == CHANGES.keys()
        for change, (losses, gathered) in mine.items():
            assert losses == theirs[change][0]
            assert losses[0] != losses[1]
            assert gathered < 0.7 * theirs[change][1] or change == "revert"


def save(world_mesh, folder):
    """Save with DCP; returns the names and the local types of the state."""
    import torch.distributed.checkpoint as dcp

    state = build(world_mesh, TWO_BY_TWO, "rowwise", True)[0].state_dict()
    dcp.save({"model": state}, checkpoint_id=folder)
    return sorted(state), {type(value.to_local()).__name__ for value in state.values()}


def load(world_mesh, folder, sizes, recipe, enabled):
    """Load the checkpoint of :func:`save`; returns the names of parameters that differ from the saved ones."""
    import torch.distributed.checkpoint as dcp

    model, _ = build(world_mesh, sizes, recipe, enabled)
    expected = [p.to_local().detach().clone() for p in model.parameters()]
    zero(model)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"], strict=True)
    pairs = zip(model.named_parameters(), expected, strict=True)
    return [name for (name, p), value in pairs if not torch.equal(p.to_local(), value)]


def test_checkpoint_loads_on_another_mesh(ranks, tmp_path):
    folder = str(tmp_path)
    assert ranks.run(4, save, folder) == [(sorted(Llama().state_dict()), {"Tensor"})] * 4
    for options in (((4, 1), "mxfp8", True), ((1, 4), "rowwise", True), (TWO_BY_TWO, "rowwise", False)):
        assert ranks.run(4, load, folder, *options) == [[]] * 4


def compare_operands(world_mesh, sizes, recipe, shapes):
    """:func:`fsdp_cases.compare_operands` with every second weight sharded by in features."""
    dp, tp = mesh_of(world_mesh, sizes)
    model = initialize(Linears(shapes)).to(world_mesh.device_type)
    full = [layer.weight.detach().to(torch.bfloat16) for layer in model.layers]
    tritonfp8.convert(model, recipe, filter=lambda module, name: True)
    styles = (ColwiseParallel(output_layouts=Replicate()), RowwiseParallel(input_layouts=Replicate()))
    parallelize_module(model, tp, {f"layers.{i}": styles[i % 2] for i in range(len(shapes))})
    enable_float8_all_gather(model)
    fully_shard(model, mesh=dp, mp_policy=BFLOAT16, reshard_after_forward=True)
    different, seen = [], []

    def compare(index, layer):
        _, *blocks = largest_blocks(layer.recipe)
        dim, gaps = index % 2, [0, 0]
        start = -(-shapes[index][dim] // tp.size()) * tp.get_local_rank()
        gaps[dim] = start % blocks[dim]
        local = layer.weight.to_local()
        if any(gaps):
            local = torch.nn.functional.pad(local, (gaps[1], 0, gaps[0], 0))
        for transposed, expected in enumerate(both_operands(full[index], layer.recipe)):
            found = operand_of(local, layer.recipe, bool(transposed))
            if not part_of(found, expected, dim ^ transposed, start, gaps[dim]):
                different.append((shapes[index], "transposed" if transposed else "untransposed"))
            seen.append(index)

    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda module, args, index=index: compare(index, module))
    model(torch.randn(3, max(k for _, k in shapes), requires_grad=True)).sum().backward()
    return different, len(seen)


@pytest.mark.parametrize("sizes", [(1, 4), (2, 2)], ids=str)
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_scales_are_those_of_one_process(ranks, recipe, sizes):
    """Blocks that lie on several ranks of tensor parallelism, of FSDP2, and of both."""
    shapes = [(300, 96), (64, 300), (131, 67), (40, 131), (7, 40), (256, 48), (33, 512)]
    if recipes.get(recipe).weights is not None:
        # Other weights have blocks on several ranks, and are gathered in high precision.
        shapes = [(n, -(-k // 128) * 128) for n, k in shapes]
    assert ranks.run(4, compare_operands, sizes, recipe, shapes) == [([], 2 * len(shapes))] * 4


# On GPUs.


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", QUANTIZED)
@pytest.mark.parametrize("sizes", [TWO_BY_TWO, HYBRID_OF_FOUR], ids=str)
def test_tp_by_fsdp2_on_gpus(four_gpus, recipe, sizes):
    check_equal_to_off(four_gpus, off_on_gpus, sizes, recipe, steps=10, timeout=240)


@pytest.mark.multigpu
@pytest.mark.parametrize("option", OPTIONS)
def test_option_on_gpus(four_gpus, option):
    options = {"sizes": TWO_BY_TWO, **OPTIONS[option]}
    check_equal_to_off(four_gpus, off_on_gpus, recipe="blockwise", timeout=240, **options)


@pytest.mark.multigpu
def test_compiled_on_gpus(four_gpus):
    check_equal_to_off(four_gpus, off_on_gpus, TWO_BY_TWO, "blockwise", compiled=LAYERS, timeout=240)
