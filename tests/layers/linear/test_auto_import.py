"""tritonfp8.distributed comes by itself where nothing has imported it."""

import subprocess
import sys
from unittest import mock

import torch

from tritonfp8.layers import extensions, tensor_types

PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
import tritonfp8

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.manual_seed(0)
model, x = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64)), torch.randn(8, 64)
tritonfp8.convert(model, "rowwise")
expected = model(x)
parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
assert "tritonfp8.distributed" not in sys.modules
# Where Dynamo traces, which cannot follow an import.
out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
out.sum().backward()
assert "tritonfp8.distributed" in sys.modules
assert torch.equal(out, expected)
assert all(p.grad is not None for p in model.parameters())
"""


def test_a_compiled_layer_imports_it():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr


def test_an_eager_layer_imports_it_and_its_name_does():
    class Distributed:
        __module__ = "torch.distributed.tensor.experimental"

    record = mock.Mock(tensor_type=Distributed, linear="handler", sources={})
    with (
        mock.patch.object(extensions, "_filled", None),
        mock.patch.object(extensions.importlib, "import_module") as imported,
    ):
        imported.side_effect = lambda name: extensions.fill(record)
        assert tensor_types.handler_of(torch.ones(1), Distributed(), None) == "handler"
    imported.assert_called_once_with("tritonfp8.distributed")
