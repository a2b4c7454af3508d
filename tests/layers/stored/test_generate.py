"""``generate()`` of transformers with stored weights: the tokens of a plain model of their values."""

import pytest
import torch
from cases import cpu_and_cuda, llama, tokens

import tritonfp8
from tritonfp8 import recipes

QUANTIZED = [name for name in recipes.names() if recipes.get(name).output.rhs is not None]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}


def stored_and_plain(name, device):
    """A Llama with stored weights, and one of their values with the same recipe."""
    model, plain = (llama(**SIZES).bfloat16().to(device).eval() for _ in range(2))
    tritonfp8.convert(model, name, mode="inference")
    plain.load_state_dict(model.state_dict())
    # Stored weights have power-of-two scales, whatever the recipe's are.
    tritonfp8.convert(plain, model.model.layers[0].mlp.down_proj.recipe)
    return model, plain


def generated(model, device, **options):
    """The tokens, and the logits that chose them."""
    found = model.generate(
        tokens(length=8, device=device), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("name", QUANTIZED)
@cpu_and_cuda
def test_a_static_cache(name, device):
    """On a GPU, transformers compiles the decoding step, as a CUDA graph."""
    model, plain = stored_and_plain(name, device)
    options = {"cache_implementation": "static"}
    (found, logits), (wanted, others) = (generated(each, device, **options) for each in (model, plain))
    assert found.shape == (2, 20)
    assert torch.equal(found, wanted)
    assert torch.equal(logits, others)
    assert "e4m3 x e4m3" in str(tritonfp8.verify(model, input_ids=tokens(device=device)))


@cpu_and_cuda
def test_a_compiled_forward(device):
    model, plain = stored_and_plain("rowwise", device)
    for each in (model, plain):
        each.forward = torch.compile(each.forward, fullgraph=True, backend="inductor" if device == "cuda" else "eager")
    options = {"cache_implementation": "static", "disable_compile": True}
    (found, logits), (wanted, others) = (generated(each, device, **options) for each in (model, plain))
    assert torch.equal(found, wanted)
    assert torch.equal(logits, others)
