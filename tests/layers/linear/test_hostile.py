"""Arguments of the wrong type or kind: a ValueError or TypeError of the package, never another error."""

import copy
import dataclasses
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import tritonfp8
from tritonfp8 import Float8Linear, Quantized, QuantSpec, Recipe, distributed, functional, recipes
from tritonfp8.recipes import Gemm
from tritonfp8.specs import testing

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*nested tensors.*"),
    pytest.mark.filterwarnings("ignore:.*Sparse (CSR|invariant).*"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization.*"),
]

PACKAGE = str(Path(tritonfp8.__file__).parent)
X, W, ONES = torch.randn(8, 32), torch.randn(16, 32), torch.ones(32)
SPEC, RECIPE = QuantSpec("e4m3", (1, -1)), recipes.get("rowwise")
Q, QW = tritonfp8.quantize(X, SPEC), tritonfp8.quantize(W, SPEC)
HELD = functional.quantize_weight(W, RECIPE)


@dataclasses.dataclass(frozen=True)
class Target:
    function: object
    arguments: dict
    # Hostile values that mean something here: (argument, value).
    fine: frozenset = frozenset()


def tensors():
    eye = torch.eye(8, 32)
    yield from (("int tensor", X.int()), ("complex", X.cfloat()), ("bool tensor", X > 0), ("fp8", Q.qdata))
    yield from (("sparse", eye.to_sparse()), ("csr", eye.to_sparse_csr()), ("mkldnn", X.to_mkldnn()))
    yield from (("0-D", torch.tensor(1.0)), ("1-D", ONES), ("3-D", torch.ones(2, 8, 32)), ("empty", torch.empty(0)))
    yield "nested", torch.nested.nested_tensor([torch.ones(3, 32), torch.ones(2, 32)])
    yield "qint8", torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)
    yield "meta", X.to("meta")


HOSTILE = {
    **dict(tensors()),
    **{repr(value): value for value in (None, 3, -1, 1.5, float("nan"), "abc", "", b"x", [1, 2], (1,), {"a": 1}, True)},
    "nested list": [[X]],
    "object": object(),
    "type": int,
    "array": np.ones((8, 32)),
    "module": nn.Linear(32, 16),
    "function": lambda *args: True,
    "dtype": torch.int8,
    "recipe": RECIPE,
    "spec": SPEC,
    "quantized": Q,
    "huge": "[" * 100_000,
}


def target(function, *fine, **arguments):
    return Target(function, arguments, frozenset(fine))


def options(name, *values):
    return [(name, value) for value in values]


@dataclasses.dataclass(frozen=True)
class Fresh:
    """A model, converted to ``recipe``, that is made for each call, which may change it."""

    recipe: str | None = None

    def make(self):
        model = nn.Sequential(nn.Linear(32, 32))
        if self.recipe is not None:
            tritonfp8.convert(model, self.recipe)
        return model


def enter(block):
    return lambda value: block(value).__enter__()


TARGETS = {
    "QuantSpec": target(QuantSpec, format="e4m3", block=(1, -1), scale_format="fp32", scale_rounding="none"),
    "Quantized": target(Quantized, ("qdata", "fp8"), ("spec", "spec"), qdata=Q.qdata, scale=Q.scale, spec=SPEC),
    "Gemm": target(Gemm, ("lhs", "spec"), ("rhs", "spec"), lhs=SPEC, rhs=SPEC, accumulation="precise"),
    "Gemm.from_dict": target(Gemm.from_dict, data=RECIPE.output.to_dict()),
    "Recipe": target(
        Recipe, ("name", "'abc'"), ("name", "huge"),
        name="a", output=RECIPE.output, grad_input=RECIPE.grad_input, grad_weight=RECIPE.grad_weight,
    ),
    "Recipe.from_dict": target(Recipe.from_dict, data=RECIPE.to_dict()),
    "Recipe.from_json": target(Recipe.from_json, text=RECIPE.to_json()),
    "Recipe.from_toml": target(Recipe.from_toml, text=RECIPE.to_toml()),
    "recipes.get": target(
        recipes.get, ("recipe", "recipe"), ("accumulation", "None"), recipe="rowwise", accumulation="fast"
    ),
    "recipes.describe": target(recipes.describe, ("recipe", "recipe"), recipe="rowwise"),
    "quantize": target(
        tritonfp8.quantize, ("spec", "spec"), ("amax", "None"), ("transpose", "True"),
        x=X, spec=SPEC, transpose=False, amax=torch.ones(8, 1),
    ),
    "quantize_both": target(
        tritonfp8.quantize_both, ("x", "meta"), ("spec", "spec"), ("spec_t", "spec"), x=X, spec=SPEC, spec_t=SPEC
    ),
    "dequantize": target(tritonfp8.dequantize, ("q", "quantized"), q=Q, dtype=torch.float32),
    "scaled_matmul": target(
        tritonfp8.scaled_matmul, ("a", "quantized"), *options("bias", "None"), ("activation", "None"),
        ("residual", "None"),
        a=Q, b=QW, bias=torch.ones(16), activation="relu", residual=torch.ones(8, 16), out_dtype=torch.float32,
        accumulation="precise",
    ),
    "amax": target(functional.amax, *options("x", "meta", "1-D", "3-D", "empty"), x=X, block=(1, -1)),
    "linear": target(
        functional.linear, *options("input", "1-D", "3-D"), ("bias", "None"), ("recipe", "recipe"),
        ("quantized_weight", "None"), ("shared_input", "None"),
        input=X, weight=W, bias=torch.ones(16), recipe="rowwise", quantized_weight=HELD,
        shared_input=functional.SharedInput(),
    ),
    "quantize_weight": target(
        functional.quantize_weight, ("weight", "meta"), ("recipe", "recipe"), ("needs_grad_input", "True"),
        weight=W, recipe=RECIPE, needs_grad_input=True,
    ),
    "Float8Linear.forward": target(
        lambda x: Float8Linear(32, 16, recipe="rowwise")(x), *options("x", "1-D", "3-D"), x=X
    ),
    "convert": target(
        tritonfp8.convert, ("model", "module"), ("recipe", "recipe"), *options("filter", "None", "function", "module"),
        ("tokens", "3"),
        model=Fresh(), recipe="rowwise", filter=None, tokens=8192,
    ),
    "swap_recipe": target(tritonfp8.swap_recipe, ("recipe", "recipe"), model=Fresh("rowwise"), recipe="blockwise"),
    "revert": target(tritonfp8.revert, model=Fresh("rowwise")),
    "quantize_weights_once": target(
        lambda model, dtype: tritonfp8.quantize_weights_once(model, dtype).__enter__(), ("dtype", "None"),
        model=Fresh("rowwise"), dtype=torch.bfloat16,
    ),
    "enable_float8_all_gather": target(
        distributed.enable_float8_all_gather, model=Fresh("rowwise"), cast="param_dtype",
    ),
    "token_counts": target(enter(distributed.token_counts), *options("value", "[1, 2]", "(1,)"), value=(1, 2)),
    "scales": target(enter(distributed.scales), value="global"),
    "Float8ColwiseParallel": target(
        distributed.Float8ColwiseParallel, ("input_layouts", "None"), ("output_layouts", "None"),
        ("use_local_output", "True"), input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=True,
    ),
    "Float8RowwiseParallel": target(
        distributed.Float8RowwiseParallel, ("input_layouts", "None"), ("output_layouts", "None"),
        ("use_local_output", "True"), input_layouts=Shard(-1), output_layouts=Replicate(), use_local_output=True,
    ),
    "PrepareFloat8ModuleInput": target(
        distributed.PrepareFloat8ModuleInput,
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False,
    ),
    "sqnr": target(testing.sqnr, actual=X, expected=X),
    "worst_tile_sqnr": target(testing.worst_tile_sqnr, actual=X, expected=X),
}  # fmt: skip
# Any kind of dense tensor of one shape is compared.
DENSE = {(name, arg, value) for name in ("sqnr", "worst_tile_sqnr") for arg in ("actual", "expected")
         for value in ("int tensor", "complex", "bool tensor", "fp8")}  # fmt: skip


def made(arguments):
    """Some functions change a model: each call gets one of its own."""

    def of_this_call(value):
        return value.make() if isinstance(value, Fresh) else copy.deepcopy(value) if type(value) is nn.Linear else value

    return {name: of_this_call(value) for name, value in arguments.items()}


def complaint(function, arguments):
    """What is wrong with how it fails, or None."""
    arguments = made(arguments)
    try:
        function(**arguments)
    except (ValueError, TypeError) as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        return None if raised_in.startswith(PACKAGE) else f"{error!r} comes from {raised_in}"
    except Exception as error:
        return repr(error)[:200]
    return "is taken"


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_arguments_are_named(name):
    goal = TARGETS[name]
    goal.function(**made(goal.arguments))
    complaints = {}
    for argument in goal.arguments:
        for kind, value in HOSTILE.items():
            if (argument, kind) not in goal.fine and (name, argument, kind) not in DENSE:
                found = complaint(goal.function, {**goal.arguments, argument: value})
                if found:
                    complaints[f"{argument}={kind}"] = found
    assert not complaints


def test_operands_on_two_devices_are_an_error():
    for operand in ("input", "weight", "bias"):
        operands = {"input": X, "weight": W, "bias": torch.ones(16)}
        operands[operand] = operands[operand].to("meta")
        with pytest.raises(ValueError, match="linear needs input, weight and bias on one device"):
            functional.linear(**operands)


def test_one_layout_without_the_other_is_an_error():
    with pytest.raises(ValueError, match="given both or neither"):
        distributed.PrepareFloat8ModuleInput(input_layouts=Shard(1))
