"""Names and checks of the snippets of docs/vision.md."""

from types import SimpleNamespace

import diffusers
import torch
from diffusion import sd3

import tritonfp8
from tritonfp8.layers.stored import StoredWeight


def pipeline(mesh):
    model, batch = sd3()
    return {"pipe": SimpleNamespace(transformer=model), "batch": batch}


def check_pipeline(names):
    model, report = names["pipe"].transformer, names["report"]
    assert len(report.converted) == 22
    assert "transformer_blocks.0.norm1.linear" in report.skipped
    assert all(block._compiled_call_impl is not None for block in model.transformer_blocks)


def on_meta(mesh):
    with torch.device("meta"):
        return {"tritonfp8": tritonfp8, "model": diffusers.DiTTransformer2DModel(num_layers=1)}


def check_auto(names):
    report = names["report"]
    assert report.is_empty
    # Its kernels would gain; not so the layers of attention.
    assert "the host would need" in report.skipped["transformer_blocks.0.ff.net.0.proj"]
    assert "it would take" in report.skipped["transformer_blocks.0.attn1.to_q"]


def plain(mesh):
    model, batch = sd3()
    return {"tritonfp8": tritonfp8, "model": model, "batch": batch}


def averaged(mesh):
    names = plain(mesh)
    tritonfp8.convert(names["model"], "rowwise")
    optimizer = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    return {**names, "optimizer": optimizer, "batches": [names["batch"]] * 2, "loss": lambda x: x.square().mean()}


def check_average(names):
    trained = list(names["model"].parameters())
    assert len(names["average"].shadow_params) == len(trained)
    assert not any(map(torch.equal, names["average"].shadow_params, trained))


def check_adapters(names):
    model = names["model"]
    assert len([p for p in model.parameters() if type(p) is StoredWeight]) == 22
    adapters = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * 4 * 2
    assert all("lora_" in name for name in adapters)
    model(**names["batch"]).sample.square().mean().backward()
