"""Packages of AOTInductor hold the codes of stored weights."""

import zipfile

import pytest
import torch
from torch import nn

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.testing import assert_bitwise_equal


@pytest.mark.slow
def test_a_package_of_aot_inductor_holds_codes(tmp_path):
    """Code in C++, which calls the ops through the dispatcher: a process that loads it imports tritonfp8."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 64)).bfloat16()
    alone = recipes.get("rowwise", batch_invariant=True)
    tritonfp8.convert(model, {"0": "blockwise", "1": alone}, mode="inference")
    x = torch.randn(16, 2048).bfloat16()
    with torch.no_grad():
        expected = model(x)
        program = torch.export.export(model, (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        found = torch._inductor.aoti_load_package(path)(x)
    assert_bitwise_equal([found], [expected])
    with zipfile.ZipFile(path) as package:
        size = sum(entry.file_size for entry in package.infolist())
    # The program itself takes 1.5 MB.
    assert size < 1.5 * 2048 * 2048
