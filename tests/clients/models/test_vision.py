"""Vision transformers, whose number of tokens is no multiple of 16: 197 an image."""

import pytest
import torch
import transformers
from cases import each_recipe, normal
from torch import nn

import tritonfp8
from tritonfp8.specs.testing import assert_bitwise_equal

TOKENS = 197


def vit(**sizes):
    torch.manual_seed(0)
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**layers, num_labels=1000, **sizes))


@pytest.mark.one_in(2)
@each_recipe
def test_every_layer_runs_and_every_weight_moves(recipe):
    model = vit()
    report = tritonfp8.convert(model, recipe)
    assert list(report.skipped) == ["classifier"]
    left = {name for name in report.high_precision if name.endswith("weight")}
    assert left >= {"classifier.weight", "vit.embeddings.patch_embeddings.projection.weight"}
    batch = {"pixel_values": normal(3 * 3 * 224, 224).view(3, 3, 224, 224), "labels": torch.tensor([1, 2, 999])}
    rows = []
    model.vit.layers[0].mlp.fc1.register_forward_pre_hook(lambda layer, args: rows.append(args[0][..., 0].numel()))
    tritonfp8.verify(model, **batch)
    assert set(rows) == {3 * TOKENS}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = model(**batch).loss
    before.backward()
    with tritonfp8.verify_training(model, optimizer):
        optimizer.step()
    assert model(**batch).loss < before


@each_recipe
def test_rows_are_the_rows_of_a_padded_batch(recipe):
    """So a batch need not be padded to a multiple of 16."""
    layer, results = nn.Linear(64, 96), []
    tritonfp8.convert(layer, recipe)
    x, grad = normal(TOKENS, 64), normal(TOKENS, 96, seed=1)
    for more in (0, -TOKENS % 16):
        leaf = nn.functional.pad(x, (0, 0, 0, more)).requires_grad_()
        out = layer(leaf)
        out.backward(nn.functional.pad(grad, (0, 0, 0, more)))
        results.append([out.detach()[:TOKENS], leaf.grad[:TOKENS]])
    assert_bitwise_equal(*results)


def test_auto_looks_at_the_tokens_of_a_step():
    """At the sizes of ViT-H the MLP gains where a step has enough images for the host; at ViT-B's nothing does."""
    with torch.device("meta"):
        huge, base = vit(), vit()
        for model, hidden in ((huge, 1280), (base, 768)):
            sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_attention_heads": hidden // 64}
            model.vit = transformers.ViTModel(transformers.ViTConfig(**sizes, num_hidden_layers=1), False)
    few = tritonfp8.convert(huge, "rowwise", filter="auto", tokens=64 * TOKENS)
    assert few.is_empty
    assert "the host would need" in next(reason for name, reason in few.skipped.items() if name.endswith("fc1"))
    found = tritonfp8.convert(huge, "rowwise", filter="auto", tokens=256 * TOKENS)
    assert {name.rpartition(".")[2] for name in found.converted} >= {"fc1", "fc2"}
    assert tritonfp8.convert(base, "rowwise", filter="auto", tokens=64 * TOKENS).is_empty
