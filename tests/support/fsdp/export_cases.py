"""Functions of each rank in the tests of exports of sharded models."""

import tempfile

import torch
from fsdp_cases import Setup, build, full_parameters, tokens_of
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import tritonfp8
from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel


def _taken(model, format):
    return {name: x.clone() for name, x in tritonfp8.export.tensors(model, format)}


def _expected(weights, exported, format):
    """Codes and scales of whole weights."""
    row = tritonfp8.export.CHECKPOINT_FORMATS[format]
    found = dict(weights)
    for layer in exported:
        q = tritonfp8.quantize(weights[f"{layer}.weight"], row.spec)
        found[f"{layer}.weight"] = q.qdata
        found[f"{layer}.{row.scale_name}"] = q.scale.view(row.scale_dtype).reshape(row.scale_shape(q.shape))
    return found


def _equal(found, expected):
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == expected[name].dtype, name
        assert torch.equal(x.view(torch.uint8), expected[name].contiguous().view(torch.uint8)), name
    return True


def fsdp(mesh, format, recipe, reshard):
    """After a step, with weights that FSDP2 left gathered: the export has the sharded values."""
    model, _ = build(mesh, Setup(recipe, reshard=reshard))
    model(tokens_of(0)).float().square().mean().backward()
    weights = full_parameters(model)
    report = tritonfp8.export.plan(model, format)
    with torch.no_grad():
        # A backward would let FSDP2 drop what it gathered.
        model(tokens_of(1))
    assert _equal(_taken(model, format), _expected(weights, report.exported, format))
    assert report.bytes_before == sum(x.nbytes for x in weights.values())
    return report.exported


def tensor_parallel(mesh, format):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
    tritonfp8.convert(model, "rowwise")
    parallelize_module(model, mesh, {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()})
    return _equal(_taken(model, format), _expected(weights, ("0", "2"), format))


def data_parallel(mesh):
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    tritonfp8.convert(model, "blockwise")
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(model))
    return _equal(_taken(wrapped, "fine_grained"), _taken(model, "fine_grained"))


def refused(mesh):
    model, _ = build(mesh, Setup())
    messages = []
    for call in (
        lambda folder: tritonfp8.export.save(model, folder, "compressed_channel"),
        lambda folder: tritonfp8.export.load(model, folder),
    ):
        with tempfile.TemporaryDirectory() as folder:
            linear = nn.Sequential(nn.Linear(16, 16))
            tritonfp8.export.save(linear, f"{folder}/plain", "compressed_channel")
            try:
                call(f"{folder}/plain" if messages else f"{folder}/new")
            except ValueError as error:
                messages.append(str(error))
    return messages
