"""Packages of AOTInductor hold the codes of stored weights."""

import zipfile

import pytest
import torch
from torch import nn
from torch.torch_version import TorchVersion

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = [
    pytest.mark.one_in(2),
    pytest.mark.slow,
    pytest.mark.skipif(
        TorchVersion(torch.__version__) < (2, 12), reason="packages of this torch cannot call ops with 8-bit tensors"
    ),
]


def linears():
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 64)).bfloat16()
    invariant = recipes.get("rowwise", batch_invariant=True)
    tritonfp8.convert(model, {"0": "blockwise", "1": invariant}, mode="inference")
    return model, (torch.randn(16, 2048).bfloat16(),), 2048 * 2048


def experts():
    module = tritonfp8.Float8Experts(8, 512, 512, recipe="rowwise", dtype=torch.bfloat16)
    tritonfp8.convert(module, "rowwise", mode="inference")
    batch = torch.randn(16, 512).bfloat16(), torch.randint(8, (16, 2)), torch.rand(16, 2).bfloat16()
    return module, batch, 8 * 3 * 512 * 512


# Headers compiled in advance, for each set of options, take longer than what two packages save by them.
OPTIONS = {"aot_inductor.precompile_headers": False}


@pytest.mark.parametrize("made", [linears, experts])
def test_a_package_of_aot_inductor_holds_codes(made, tmp_path):
    """Code in C++, which calls the ops through the dispatcher: a process that loads it imports tritonfp8."""
    torch.manual_seed(0)
    (model, batch, elements), path = made(), tmp_path / "model.pt2"
    with torch.no_grad():
        expected = model(*batch)
        program = torch.export.export(model, batch)
        torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=OPTIONS)
        found = torch._inductor.aoti_load_package(str(path))(*batch)
    assert_bitwise_equal([found], [expected])
    with zipfile.ZipFile(path) as package:
        # The program itself takes 1.5 MB.
        assert sum(entry.file_size for entry in package.infolist()) < 1.5 * elements
