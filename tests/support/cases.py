"""Specs and inputs that several test files share."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
import triton
from cast_counts import CASTS
from strategies import VALID_SPECS as SPECS

from tritonfp8 import recipes, reference
from tritonfp8.ops import direct
from tritonfp8.specs import BLOCKS

# The names of recipes that quantize.
QUANTIZED = [name for name in recipes.names() if recipes.get(name).output.quantized]
# Recipes that can train weights as codes.
IN_BYTES = [name for name in QUANTIZED if recipes.get(name).weights is None]
# Recipes whose transposes are made from codes, by the name of the recipe.
CODES = {name: recipes.get(name, transposed_from="codes") for name in ("rowwise", "blockwise", "mxfp8")}


def rounded(weight, recipe):
    """A weight as a recipe quantizes it; a zero fills the last byte of odd rows."""
    if recipe.weights is None or not weight.numel():
        return weight
    odd = weight.shape[-1] % 2
    codes = reference.quantize(torch.nn.functional.pad(weight, (0, odd)), *recipe.weights.args)
    return reference.dequantize(*codes, *recipe.weights.args, weight.dtype)[..., : weight.shape[-1]]


def named(recipe):
    """The id of a recipe that is given by name or as a Recipe."""
    return getattr(recipe, "name", recipe)


# Each with one dtype, so that each format, block and rounding of scales occurs with both.
SPEC_AND_DTYPE = [
    (spec, (torch.bfloat16, torch.float16)[(i + (spec.format == "e5m2")) % 2]) for i, spec in enumerate(SPECS)
]
# One spec of each block shape, where format and rounding make no difference.
SPEC_OF_BLOCK = [next(spec for spec in SPECS if spec.block == block) for block in BLOCKS]

# Matrices that a cast's tiles hold in different ways.
MATRICES = {
    "whole tiles": (256, 128),
    "tails": (300, 200),
    "no vectors": (131, 77),
    "one row": (1, 96),
    "tall": (5000, 8),
}

INTERPRETER = pytest.param(
    "cpu",
    id="interpreter",
    marks=pytest.mark.skipif(
        not triton.knobs.runtime.interpret, reason="kernels are compiled in this process, not interpreted"
    ),
)
CUDA = pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)

each_recipe_and_codes = pytest.mark.parametrize("recipe", [*recipes.names(), *CODES.values()], ids=named)
each_recipe = pytest.mark.parametrize("recipe", recipes.names())
each_spec = pytest.mark.parametrize("spec", SPECS, ids=str)
each_block = pytest.mark.parametrize("spec", SPEC_OF_BLOCK, ids=lambda spec: BLOCKS[spec.block].name)
# For kernels: the interpreter runs them on CPU tensors.
each_device = pytest.mark.parametrize("device", [INTERPRETER, CUDA])
# For ops and code above them: on CPU tensors ops run the reference.
cpu_and_cuda = pytest.mark.parametrize("device", ["cpu", CUDA])


def on_devices(few, **options):
    """Parametrize ``device`` and these options: by ``few`` cases in the slow interpreter, by the product on a GPU."""
    params = [
        pytest.param(*device.values, *case, id="-".join([*map(str, case), device.id]), marks=device.marks)
        for device, cases in ((INTERPRETER, few), (CUDA, itertools.product(*options.values())))
        for case in cases
    ]
    return pytest.mark.parametrize(("device", *options), params)


FLOAT32_NONFINITE = 0x7F800000


def generator(seed):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=generator(seed)).to(device, dtype)


def patterns(dtype):
    """Every bit pattern of a 16-bit dtype, ``[512, 128]``, in order: a row has one or a few binades."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).view(512, 128)


def finite_patterns(dtype, seed=0):
    """The bit patterns of a 16-bit dtype in random order, ``[512, 128]``, with zeros for NaN and infinities."""
    x = patterns(dtype).flatten()[torch.randperm(2**16, generator=generator(seed))].view(512, 128)
    return torch.where(x.isfinite(), x, 0)


def random_bits(*shape, seed=0):
    """float32 of random bits: all magnitudes, subnormals, NaN and infinities."""
    bits = torch.from_numpy(np.random.default_rng(seed).integers(-(2**31), 2**31, shape, np.int64))
    return bits.to(torch.int32).view(torch.float32)


def finite_bits(*shape, seed=0):
    """:func:`random_bits` with the largest exponent replaced by the next smaller one, so that all are finite."""
    x = random_bits(*shape, seed=seed)
    bits = x.view(torch.int32)
    return torch.where(x.isfinite(), bits, bits & ~(1 << 23)).view(torch.float32)


def banded(*shape, seed=0, dtype=torch.float32):
    """Normal values, with rows of magnitudes up to 2^40 apart (2^8 in fp16), zeros of both signs and zero rows."""
    g = generator(seed)
    x = torch.randn(*shape, generator=g)
    spread = 4 if dtype == torch.float16 else 20
    x = x * torch.exp2(torch.randint(-spread, spread, (*shape[:-1], 1), generator=g).float())
    kind = torch.randint(0, 16, shape, generator=g)
    x = torch.where(kind == 0, 0.0, torch.where(kind == 1, -0.0, x))
    x[..., ::11, :] *= 0
    return x.to(dtype)


def interesting_amaxes():
    """Zero, subnormals, the extremes, and each power of two times 1 and 1.75 (the fraction of both qmax), +-1 ulp."""
    exponents = torch.arange(255, dtype=torch.int32) << 23
    steps = [exponents + step for step in (0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF)]
    random = torch.randint(0, 0x7F800000, (500,), generator=generator(0), dtype=torch.int32)
    return torch.cat([*steps, random]).view(torch.float32)


def with_specials(x, seed=0):
    """``x`` with a NaN, a negative NaN and both infinities at random places."""
    x = x.clone()
    places = torch.randperm(x.numel(), generator=generator(seed))[:4]
    x.view(-1)[places] = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf]).to(x.device, x.dtype)
    return x


def surrounded(x, *, offset=0, row_padding=0, row_step=1, col_step=1, fill=torch.nan):
    """A view that equals the matrix ``x``, in a buffer otherwise filled with ``fill``.

    It starts ``offset`` elements into the buffer and takes every ``row_step``-th row and ``col_step``-th column; each
    row of the buffer is followed by ``row_padding`` elements.
    """
    rows, cols = x.shape
    width = cols * col_step + row_padding
    buffer = torch.full((offset + rows * row_step * width + 1,), fill).to(x.device, x.dtype)
    return buffer[offset:-1].view(rows * row_step, width)[::row_step, : cols * col_step : col_step].copy_(x)


def views(x):
    """The matrix ``x`` (or a part of it repeated) in every kind of memory layout, by name."""
    return {
        "contiguous": x,
        "transposed": x.t().contiguous().t(),
        "odd row stride": surrounded(x, row_padding=3),
        "aligned row stride": surrounded(x, row_padding=-x.shape[1] % 16 + 16),
        "odd offset": surrounded(x, offset=1),
        "every other row": surrounded(x, row_step=2),
        "every third column": surrounded(x, col_step=3),
        "one row expanded": x[:1].expand(x.shape),
        "one column expanded": x[:, :1].expand(x.shape),
        "one element expanded": x[:1, :1].expand(x.shape),
    }


def llama(**config):
    """A two-layer Llama of float32 random weights, the same at each call."""
    import transformers

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": False, **config})
    )


def with_head(recipe):
    """A recipe for every layer of a model with an lm_head, which is converted only by a pattern that names it."""
    return {"lm_head": recipe, "*": recipe}


def tokens(batch=2, length=9, seed=0, device="cpu"):
    return torch.randint(0, 128, (batch, length), generator=generator(seed)).to(device)


def with_gradients(out, wanted, grad=None):
    """The result of a forward, and the gradients of ``wanted`` for the result's gradient, or for ones."""
    return [out.detach(), *torch.autograd.grad(out, list(wanted), torch.ones_like(out) if grad is None else grad)]


@contextlib.contextmanager
def recorded_casts(device="cpu"):
    """Record the results of all casts on the device, eager or compiled. The reference computes them."""
    results = []

    def recording(name):
        def run(*args, **kwargs):
            out = getattr(reference, name)(*args, **kwargs)
            results.append(out)
            return out

        return run

    with torch.library._scoped_library("tritonfp8", "IMPL") as library, pytest.MonkeyPatch.context() as patch:
        for name in CASTS:
            library.impl(name, recording(name), device.upper(), allow_override=True)
            # Graphs of Inductor call these in place of the ops.
            patch.setattr(direct.CALLS, name, recording(name))
        yield results
