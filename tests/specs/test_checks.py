"""The checks of arguments: what passes, and what the errors say."""

import pytest
import torch

from tritonfp8.specs.checks import check_floating, require


def test_require():
    require("mode", "a", ("a", "b"))
    with pytest.raises(ValueError, match=r"^mode must be one of 'a', 'b'; got 'c'$"):
        require("mode", "c", ("a", "b"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floating_tensors_pass(dtype):
    check_floating("x", torch.zeros(1, dtype=dtype))


@pytest.mark.parametrize("x", [torch.zeros(1, dtype=torch.int32), torch.zeros(1).to(torch.float8_e4m3fn), [1.0], None])
def test_others_are_a_type_error(x):
    with pytest.raises(TypeError, match=r"^x must be .*; got"):
        check_floating("x", x)
