"""The iterator: names, order, and one layer in memory."""

import gc
import weakref

import pytest
import torch
from checkpoints import FORMATS, files_of, model_of
from torch import nn

import tritonfp8


@pytest.mark.parametrize("format", FORMATS)
def test_it_gives_what_save_writes(tmp_path, format):
    model = model_of("qwen3", tie_word_embeddings=True)
    tritonfp8.export.save(model, tmp_path, format)
    stored = files_of(tmp_path)
    found = list(tritonfp8.export.tensors(model, format))
    assert {name for name, _ in found} == set(stored)
    assert len(found) == len(stored)
    for name, x in found:
        assert x.dtype == stored[name].dtype
        assert x.is_contiguous()
        assert not x.requires_grad
        assert torch.equal(x.view(torch.uint8), stored[name].view(torch.uint8)), name


def test_a_scale_follows_its_codes_and_gradients_are_recorded_between_steps():
    names = []
    for name, _ in tritonfp8.export.tensors(model_of(), "fine_grained"):
        names.append(name)
        assert torch.is_grad_enabled()
    scales = [at for at, name in enumerate(names) if name.endswith("_scale_inv")]
    assert len(scales) == 7
    assert all(names[at] == f"{names[at - 1]}_scale_inv" for at in scales)


def test_it_holds_one_layer_at_a_time():
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    alive, most = [], 0
    gc.disable()
    try:
        for _, x in tritonfp8.export.tensors(model, "compressed_channel"):
            alive.append(weakref.ref(x.untyped_storage()))
            del x
            most = max(most, sum(ref() is not None for ref in alive))
    finally:
        gc.enable()
    assert len(alive) == 12
    # The storage object of a tensor dies with it, so only what the iterator holds is counted.
    assert most <= 2


def test_layers_are_quantized_when_they_are_asked_for():
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
    stream = tritonfp8.export.tensors(model, "compressed_tensor")
    first = [next(stream), next(stream)]
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(3.0)
    second = [next(stream), next(stream)]
    assert first[0][1].float().unique().numel() > 2
    assert torch.equal(second[0][1].float() * second[1][1], torch.full((128, 128), 3.0))


def test_tensors_in_high_precision_are_not_copied_unless_cast():
    model = model_of()
    embedding = model.model.embed_tokens.weight
    found = dict(tritonfp8.export.tensors(model, "fine_grained"))
    assert found["model.embed_tokens.weight"].data_ptr() == embedding.data_ptr()
    found = dict(tritonfp8.export.tensors(model, "fine_grained", dtype=torch.float16))
    assert torch.equal(found["model.embed_tokens.weight"], embedding.half())
    norm = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128))
    found = dict(tritonfp8.export.tensors(norm, "compressed_channel", dtype=torch.bfloat16))
    assert found["1.num_batches_tracked"].dtype == torch.int64
    assert found["1.running_var"].dtype == torch.bfloat16


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_that_is_not_finite_is_an_error(tmp_path, format, value):
    model = model_of()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.down_proj.weight has a NaN or an infinity"):
        tritonfp8.export.save(model, tmp_path, format)
    assert list(tmp_path.iterdir()) == []
