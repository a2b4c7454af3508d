"""Models of transformers with stored weights: the tokens of a plain model of their values, and their checkpoints."""

import pytest
import torch
from cases import QUANTIZED, cpu_and_cuda, llama, tokens
from mixtures import FAMILIES, experts_of, model_of

import tritonfp8
from tritonfp8.specs.testing import assert_bitwise_equal

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
OPTIONS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "output_logits": True}


def pair(make, recipe, device="cpu"):
    """A model with stored weights, and one of their values with the same recipe; and the report."""
    model, plain = (make().to(device).eval() for _ in range(2))
    report = tritonfp8.convert(model, recipe, mode="inference")
    plain.load_state_dict(model.state_dict())
    # Stored weights have power-of-two scales, whatever the recipe's are.
    tritonfp8.convert(plain, next(iter(report.converted.values())))
    return model, plain, report


def check_generated(models, device="cpu", **options):
    """The models choose the same tokens, by the same logits."""
    prompt = tokens(length=8, device=device) % 96
    options = {**OPTIONS, "cache_implementation": "static", "return_dict_in_generate": True, **options}
    found, wanted = (each.generate(prompt, **options) for each in models)
    assert found.sequences.shape == (2, 20)
    assert torch.equal(found.sequences, wanted.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(wanted.logits))
    return tritonfp8.verify(models[0], input_ids=prompt)


@pytest.mark.parametrize("name", QUANTIZED)
@cpu_and_cuda
def test_a_static_cache(name, device, tmp_path):
    """On a GPU, transformers compiles the decoding step, as a CUDA graph."""
    model, plain, report = pair(lambda: llama(**SIZES).bfloat16(), name, device)
    assert "lm_head" in report.skipped
    operands = "e4m3 x e2m1" if name == "mxfp4_weights" else "e4m3 x e4m3"
    assert operands in str(check_generated((model, plain), device))
    check_saved(model, tmp_path)


@cpu_and_cuda
def test_a_compiled_forward(device):
    models = pair(lambda: llama(**SIZES).bfloat16(), "rowwise", device)[:2]
    for each in models:
        each.forward = torch.compile(each.forward, fullgraph=True, backend="inductor" if device == "cuda" else "eager")
    check_generated(models, device, disable_compile=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures(family, tmp_path):
    model, plain, report = pair(lambda: model_of(family, torch.bfloat16), "rowwise")
    assert report.experts.keys() == experts_of(model).keys()
    ran = check_generated((model, plain)).layers
    assert all(ran[name].gemms["output"].dtype == "e4m3 x e4m3" for name in experts_of(model))
    check_saved(model, tmp_path)


def check_saved(model, folder):
    """``save_pretrained`` writes the values."""
    model.save_pretrained(folder)
    found, expected = type(model).from_pretrained(folder, dtype=torch.bfloat16).state_dict(), model.state_dict()
    assert found.keys() == expected.keys()
    # transformers loads a bias of some routers in float32.
    assert_bitwise_equal(
        [found[name].to(x.dtype) for name, x in expected.items()], [x.cpu() for x in expected.values()]
    )
