"""Functions of each rank in the tests of pipeline stages. Each returns plain data."""

import contextlib
import hashlib

import torch
import torch.nn.functional as F
from fsdp_models import VOCABULARY, Block, initialize
from process_group import made_mesh
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO_BATCHES, LENGTH = 4, 7


class Stage(nn.Module):
    """One of ``stages`` pipeline stages of a Llama, with one layer each."""

    def __init__(self, index, stages, hidden=42):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden) if index == 0 else None
        self.layer = Block(hidden, 3, 131)
        self.last = nn.Linear(hidden, VOCABULARY) if index == stages - 1 else None

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        x = self.layer(x)
        return x if self.last is None else self.last(x)


def stages_of(count, recipe):
    parts = [initialize(Stage(i, count)) for i in range(count)]
    for part in parts:
        tritonfp8.convert(part, recipe)
    return parts


def batch_of(rank=0):
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(VOCABULARY, (2 * MICRO_BATCHES, LENGTH), generator=generator)


def loss_of(logits, tokens):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _digest(parameters):
    found = hashlib.sha256()
    for parameter in parameters:
        grad = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        found.update(grad.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _pipelined(part, index, count, schedule, group, tokens, held=False):
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
        grads.append(_digest(part.parameters()))
        with torch.no_grad():
            for parameter in part.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return losses, grads


def in_one_process(mesh, count, recipe):
    """Losses of two steps without a pipeline, micro-batch by micro-batch; digests of each stage's gradients."""
    parts, tokens = stages_of(count, recipe), batch_of()
    model = nn.Sequential(*parts)
    losses, grads = [], []
    for _ in range(2):
        model.zero_grad()
        of_step = []
        for micro in tokens.chunk(MICRO_BATCHES):
            loss = loss_of(model(micro), micro)
            loss.backward()
            of_step.append(loss.item())
        for parameter in model.parameters():
            parameter.grad.div_(MICRO_BATCHES)
        losses.append(of_step)
        grads.append([_digest(part.parameters()) for part in parts])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
    return losses, grads


def pipelined(mesh, recipe, schedule, held=False):
    """Run this rank's stage of a pipeline over all ranks."""
    index, count = mesh.get_local_rank(), mesh.size()
    part = stages_of(count, recipe)[index]
    return _pipelined(part, index, count, schedule, mesh.get_group(), batch_of(), held)


def pipelined_shards(mesh, recipe, schedule, enabled):
    """Run this rank's stage of a pipeline of two stages, each sharded over two ranks by FSDP2."""
    grid = made_mesh(mesh.device_type, (2, 2), ("pp", "dp"))
    pipeline, shards = grid["pp"], grid["dp"]
    index = pipeline.get_local_rank()
    part = stages_of(2, recipe)[index]
    if enabled:
        enable_float8_all_gather(part)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(part.layer, mesh=shards, mp_policy=policy)
    fully_shard(part, mesh=shards, mp_policy=policy)
    return _pipelined(part, index, 2, schedule, pipeline.get_group(), batch_of(shards.get_local_rank()))


def held_shards(mesh):
    """Outputs of a sharded stage for two micro-batches: in each pass quantized, and quantized once."""
    part = stages_of(1, "rowwise")[0]
    fully_shard(part, mesh=mesh)
    batches = batch_of(mesh.get_local_rank()).chunk(2)
    plain = [part(batch).detach() for batch in batches]
    with tritonfp8.quantize_weights_once(part):
        return plain, [part(batch).detach() for batch in batches]
