"""Pipeline stages of converted layers: the bits of the model that is not cut into stages."""

import contextlib
import functools
import hashlib

import pytest
import torch
from cases import CODES, QUANTIZED, each_recipe_and_codes, named
from fsdp_cases import BFLOAT16, bytes_of, same_as_without
from fsdp_models import VOCABULARY, Stage, initialize, loss_of
from process_group import made_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(3)]

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO_BATCHES, LENGTH = 4, 7


def stages_of(count, recipe):
    parts = [initialize(Stage(i, count)) for i in range(count)]
    for part in parts:
        tritonfp8.convert(part, recipe)
    return parts


def batch_of(rank=0):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCABULARY, (2 * MICRO_BATCHES, LENGTH), generator=generator)


def update(module, micro_batches=1):
    """Take a step along the gradients; returns their hash."""
    found = hashlib.sha256()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.grad.div_(micro_batches)
            grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            found.update(bytes_of(grad))
            parameter.sub_(0.1 * parameter.grad)
    return found.hexdigest()


def run_stage(part, index, count, schedule, group, tokens, held=False):
    """Losses of two steps (on the last stage), and digests of this stage's gradients."""
    stage = PipelineStage(part, index, count, torch.device("cpu"), group=group)
    run = SCHEDULES[schedule](stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)
    losses, grads = [], []
    for _ in range(2):
        part.zero_grad()
        with tritonfp8.quantize_weights_once(part) if held else contextlib.nullcontext():
            of_step = []
            if index == 0:
                run.step(tokens)
            else:
                run.step(target=tokens if index == count - 1 else None, losses=of_step)
        losses.append([loss.item() for loss in of_step])
        grads.append(update(part))
    return losses, grads


def pipelined(mesh, recipe, schedule, held=False):
    """Run this rank's stage of a pipeline over all ranks."""
    index, count = mesh.get_local_rank(), mesh.size()
    part = stages_of(count, recipe)[index]
    return run_stage(part, index, count, schedule, mesh.get_group(), batch_of(), held)


def run_in_one_process(mesh, count, recipe):
    """Losses of two steps without a pipeline, micro-batch by micro-batch; digests of each stage's gradients."""
    parts, tokens = stages_of(count, recipe), batch_of()
    model = nn.Sequential(*parts)
    losses, grads = [], []
    for _ in range(2):
        model.zero_grad()
        losses.append([])
        for micro in tokens.chunk(MICRO_BATCHES):
            loss = loss_of(model(micro), micro)
            loss.backward()
            losses[-1].append(loss.item())
        grads.append([update(part, MICRO_BATCHES) for part in parts])
    return losses, grads


@pytest.fixture(scope="module")
def check_equal_to_one_process(ranks):
    in_one_process = functools.cache(functools.partial(ranks.run, 1, run_in_one_process))

    def check(count, recipe, **options):
        [(losses, grads)] = in_one_process(count, recipe)
        found = ranks.run(count, pipelined, recipe, **options)
        assert found[-1][0] == losses
        assert [list(step) for step in zip(*(of_stage for _, of_stage in found), strict=True)] == grads

    return check


@each_recipe_and_codes
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages(check_equal_to_one_process, schedule, recipe):
    check_equal_to_one_process(2, recipe, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages(check_equal_to_one_process, schedule):
    check_equal_to_one_process(4, "rowwise", schedule=schedule)


@each_recipe_and_codes
def test_weights_quantized_once_for_all_micro_batches(check_equal_to_one_process, recipe):
    check_equal_to_one_process(2, recipe, schedule="1f1b", held=True)


def pipelined_shards(mesh, recipe, schedule, enabled):
    """Run this rank's stage of a pipeline of two stages, each sharded over two ranks by FSDP2."""
    grid = made_mesh(mesh.device_type, (2, 2), ("pp", "dp"))
    pipeline, shards = grid["pp"], grid["dp"]
    index = pipeline.get_local_rank()
    part = stages_of(2, recipe)[index]
    if enabled:
        enable_float8_all_gather(part)
    for module in (part.layer, part):
        fully_shard(module, mesh=shards, mp_policy=BFLOAT16)
    return run_stage(part, index, 2, schedule, pipeline.get_group(), batch_of(shards.get_local_rank()))


# A schedule orders the micro-batches. Recipes differ there only in whether scales are gathered.
@pytest.mark.parametrize(
    ("schedule", "recipe"),
    [*(("1f1b", recipe) for recipe in (*QUANTIZED, *CODES.values())), ("gpipe", "rowwise")],
    ids=named,
)
def test_fp8_all_gather_inside_stages_changes_no_bit(ranks, schedule, recipe):
    on, _ = same_as_without(ranks, 4, pipelined_shards, recipe, schedule)
    assert on[2][0] != on[3][0] != [[], []]


def held_shards(mesh):
    """Outputs of a sharded stage for two micro-batches: in each pass quantized, and quantized once."""
    part = stages_of(1, "rowwise")[0]
    fully_shard(part, mesh=mesh)
    batches = batch_of(mesh.get_local_rank()).chunk(2)
    plain = [part(batch).detach() for batch in batches]
    with tritonfp8.quantize_weights_once(part):
        return plain, [part(batch).detach() for batch in batches]


def test_sharded_stage_quantizes_once(ranks):
    for plain, once in ranks.run(2, held_shards):
        assert_bitwise_equal(torch.cat(once), torch.cat(plain))
