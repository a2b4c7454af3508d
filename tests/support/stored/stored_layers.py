"""Small modules whose weights are stored in 8 bits, of two kinds, and plain modules of the same values."""

import io

import pytest
import torch
from cases import normal
from torch import nn

import tritonfp8
from tritonfp8 import Float8Experts, recipes
from tritonfp8.layers.stored import StoredMatrices, StoredWeight, recipe_of_storage, replacing, stored_as_layer
from tritonfp8.specs import QuantSpec
from tritonfp8.specs.testing import assert_bitwise_equal

# Experts, features of a token, and inside of an expert: no multiples of the blocks.
EXPERTS, HIDDEN, INSIDE = 4, 144, 112


class Linears:
    """Two linear layers."""

    stored_type, elements, has_experts = StoredWeight, 2 * 200 * 136, False

    def made(self, dtype=torch.bfloat16, device="cpu"):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(200, 136), nn.GELU(), nn.Linear(136, 200)).to(device, dtype)

    def of_recipe(self, recipe, dtype=torch.bfloat16, device="cpu"):
        """With weights in high precision."""
        model = self.made(dtype, device)
        tritonfp8.convert(model, recipe)
        return model

    def inputs(self, dtype=torch.bfloat16, device="cpu"):
        return (normal(33, 200, seed=1, dtype=dtype, device=device),)

    def first(self, model):
        """The module of the first weight, and the weight's name there."""
        return model[0], "weight"


class Experts:
    """Experts; the last one has no token."""

    stored_type, elements, has_experts = StoredMatrices, 3 * EXPERTS * HIDDEN * INSIDE, True

    def made(self, dtype=torch.bfloat16, device="cpu"):
        return self.of_recipe("rowwise", dtype, device)

    def of_recipe(self, recipe, dtype=torch.bfloat16, device="cpu"):
        torch.manual_seed(0)
        recipe = "rowwise" if recipe == MXFP4 else recipe
        return Float8Experts(EXPERTS, HIDDEN, INSIDE, recipe=recipe, bias=True, dtype=dtype).to(device)

    def inputs(self, dtype=torch.bfloat16, device="cpu"):
        index = torch.rand(29, EXPERTS, generator=torch.Generator().manual_seed(1)).topk(2).indices
        index = torch.where(index == EXPERTS - 1, 0, index).to(device)
        factors = normal(29, 2, seed=2, dtype=dtype, device=device)
        return normal(29, HIDDEN, dtype=dtype, device=device), index, factors

    def first(self, model):
        return model, "gate_up_proj"


# A recipe, whose weights are stored as MXFP4 when they are stored.
MXFP4 = "mxfp4"
MXFP4_SPEC = QuantSpec("e2m1", (1, 32), "e8m0", "floor")


def spec_of(recipe="rowwise"):
    """How a weight is stored by a recipe."""
    if recipe == MXFP4:
        return MXFP4_SPEC
    return recipe_of_storage(recipes.get(recipe)).output.rhs


LINEARS, EXPERTS_KIND = Linears(), Experts()
each_kind = pytest.mark.parametrize("kind", [LINEARS, EXPERTS_KIND], ids=["linears", "experts"])


def store(kind, model, recipe, **options):
    options = options or {"mode": "inference"}
    if recipe != MXFP4:
        return tritonfp8.convert(model, recipe, **options)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = tritonfp8.convert(model, "rowwise", **options)
    for name, layer in model.named_modules():
        for key, parameter in layer._parameters.items():
            if isinstance(parameter, StoredWeight):
                before = values[f"{name}.{key}".lstrip(".")]
                weight = stored_as_layer(layer, key, before, MXFP4_SPEC)
                layer._parameters[key] = replacing(parameter, weight, parameter.requires_grad)
    return report


def stored(kind, recipe, dtype=torch.bfloat16, device="cpu"):
    model = kind.of_recipe(recipe, dtype, device) if kind.has_experts else kind.made(dtype, device)
    store(kind, model, recipe)
    return model


def stored_and_plain(kind, recipe, dtype=torch.bfloat16, device="cpu"):
    """Stored weights, and plain weights of their values with the same recipe."""
    model = stored(kind, recipe, dtype, device)
    plain = kind.of_recipe(kind.first(model)[0].recipe, dtype, device)
    plain.load_state_dict(model.state_dict())
    for weight in weights_of(plain):
        weight.requires_grad_(False)
    return model, plain


def weights_of(model):
    return [p for name, p in model.named_parameters() if "bias" not in name]


def codes_of(model):
    return [weight._qdata for weight in weights_of(model)]


def call(model, kind, dtype=torch.bfloat16):
    return model(*kind.inputs(dtype))


def results(run, model, inputs):
    """Output, and the gradients of the inputs and of the two biases."""
    leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    out = run(*leaves)
    biases = [p for p in model.parameters() if p.requires_grad]
    assert len(biases) == 2
    wanted = [*(x for x in leaves if x.requires_grad), *biases]
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), wanted)]


def check_bits(kind, recipe, dtype, device):
    """Stored weights compute what plain weights of their values do, in half of the memory."""
    model, plain = stored_and_plain(kind, recipe, dtype, device)
    inputs = kind.inputs(dtype, device)
    assert_bitwise_equal(results(model, model, inputs), results(plain, plain, inputs))
    for weight in weights_of(model):
        assert type(weight) is kind.stored_type
        assert isinstance(weight, nn.Parameter)
        of_rows = 4 * weight._qdata.shape[:-1].numel() if weight.spec == MXFP4_SPEC else 0
        assert weight.nbytes - of_rows <= (0.27 * 2 if weight.spec == MXFP4_SPEC else 1.04) * weight.numel()
        assert not weight.requires_grad


def reloaded(found, **options):
    """What ``torch.load`` reads of what ``torch.save`` wrote."""
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    return torch.load(file, **options)
