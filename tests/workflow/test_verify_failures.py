"""tritonfp8.verify finds each way in which a converted layer does not run in FP8, and says what to do."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tritonfp8
from tritonfp8.compat import hardware
from tritonfp8.workflow.verification_report import Failure, VerificationReport

M = 16


class Pair(nn.Module):
    """Two layers; ``how`` is the code that stands for the second."""

    def __init__(self, how=None):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.how = how

    def forward(self, x):
        x = self.a(x)
        return self.b(x) if self.how is None else self.how(self, x)


def pair(how=None, recipe="tensorwise"):
    model = Pair(how)
    tritonfp8.convert(model, recipe)
    return model


def x():
    return torch.randn(M, 32)


def failures(model, inputs=None, **options):
    with pytest.raises(tritonfp8.VerificationError) as caught:
        tritonfp8.verify(model, x() if inputs is None else inputs, **options)
    report = caught.value.report
    assert not report.ok
    for each in report.failures:
        assert re.search(rf"{re.escape(each.layer or 'the model')}\b.*: {re.escape(each.what)}", str(caught.value))
        assert each.cause in str(report)
    return {each.layer: f"{each.cause}. {each.remedy}" for each in report.failures}


def check_one(model, *texts, **options):
    """Only the second layer fails, for this reason."""
    found = failures(model, **options)
    assert found.keys() == {"b"}
    assert all(text in found["b"] for text in texts), found


def old_gpu(monkeypatch):
    abilities = dataclasses.replace(hardware.CPU, name="NVIDIA A100", capability=(8, 0), has_fp8_mma=False)
    monkeypatch.setattr(hardware, "abilities", lambda device: abilities)


def test_a_layer_that_is_never_called():
    check_one(pair(lambda self, x: x), "never called, and nothing of torch multiplied its weight")


@pytest.mark.parametrize(
    "how",
    [
        lambda self, x: F.linear(x, self.b.weight, self.b.bias),
        lambda self, x: x @ self.b.weight.t(),
        lambda self, x: torch.einsum("mk,nk->mn", x, self.b.weight),
        lambda self, x: (self.b.weight @ x.t()).t(),
        lambda self, x: F.linear(x.double(), self.b.weight.double()),
    ],
    ids=["linear", "matmul", "einsum", "left", "copy"],
)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_weight_that_a_function_reads(how, autocast):
    """As the attention of WavLM reads ``out_proj``, and Mamba reads ``dt_proj``."""
    model = pair(how)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        # Autocast keeps the casts of this call.
        model(x())
        check_one(model, "it was never called: its weight was multiplied by aten.", "call the layer")


def test_a_weight_that_a_function_reads_in_inference_mode():
    model = pair(lambda self, x: F.linear(x, self.b.weight, self.b.bias))
    with torch.inference_mode():
        check_one(model, "its weight was multiplied by aten.", inputs=torch.randn(2, M, 32), backward=False)


def test_a_weight_that_is_also_read_outside_of_its_layer():
    model = pair(lambda self, x: self.b(x) + F.linear(x, self.b.weight))
    check_one(model, "its weight was also multiplied by aten.mm in float32, outside of the layer")


WRITES = {
    "data": lambda x: x.data.mul_(3),
    "numpy": lambda x: x.detach().numpy().__imul__(3),
    "counted": lambda x: x.detach().mul_(3),
    "new": lambda x: None,
}


class Siblings(nn.Module):
    """Layers that read one tensor, which is written to in between."""

    def __init__(self, write):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.write = write

    def forward(self, x):
        x = self.norm(x)
        q = self.q_proj(x)
        WRITES[self.write](x)
        return q + self.k_proj(x)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "mxfp8"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_between_siblings_that_torch_does_not_count(write, recipe):
    model = Siblings(write)
    tritonfp8.convert(model, recipe)
    if write in ("counted", "new"):
        assert tritonfp8.verify(model, x(), backward=write == "new").ok
        return
    [(layer, failure)] = failures(model, backward=False).items()
    assert layer == "k_proj"
    assert "a write that torch does not count (x.data, x.numpy()" in failure
    assert "under torch.no_grad()" in failure


def test_the_table_shows_who_read_a_weight():
    model = pair(lambda self, x: F.linear(x, self.b.weight))
    with pytest.warns(UserWarning, match="b: it was never called"):
        report = tritonfp8.verify(model, x(), on_failure="warn")
    (row,) = (line for line in str(report).splitlines() if line.startswith("b.weight"))
    assert row.split("  ")[0] == "b.weight"
    assert "read elsewhere" in row
    assert "aten.mm in float32" in row


def test_a_weight_that_a_layer_shares_with_one_that_is_not_converted():
    model = Pair()
    model.b.weight = model.a.weight
    tritonfp8.convert(model, "tensorwise", filter=lambda module, name: name == "a")
    report = tritonfp8.verify(model, x())
    assert report.others.keys() == {"a.weight = b.weight"}


def test_the_fast_path_of_a_transformer_layer():
    model = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    tritonfp8.convert(model, "tensorwise")
    inputs = torch.randn(2, M, 32)
    found = failures(model, inputs, backward=False)
    assert found.keys() == {"linear1", "linear2"}
    assert "aten._transformer_encoder_layer_fwd" in found["linear1"]
    assert "torch.backends.mha.set_fastpath_enabled(False)" in found["linear1"]
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert tritonfp8.verify(model, inputs, backward=False).ok
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_a_layer_whose_forward_was_replaced():
    model = pair()
    model.b.forward = lambda x: F.linear(x, model.b.weight)
    check_one(model, "multiplied by aten.mm in float32")


def test_a_layer_that_was_replaced():
    """As ``resize_token_embeddings`` replaces ``lm_head``."""
    model = pair()
    model.b = nn.Linear(32, 40)
    check_one(model, "a Linear has taken the place", "tritonfp8.convert(model.get_submodule('b'), recipe)")
    tritonfp8.convert(model.get_submodule("b"), "tensorwise")
    assert tritonfp8.verify(model, x()).ok


def test_a_layer_that_is_gone_and_every_layer_replaced():
    model = pair()
    model.both, model.how = nn.Linear(32, 32), lambda self, x: self.both(x)
    del model.b
    check_one(model, "no module has its name now")
    model = pair()
    model.a, model.b = nn.Linear(32, 32), nn.Linear(32, 32)
    assert failures(model).keys() == {"a", "b"}


def test_an_adapter_around_a_layer_is_no_replacement():
    class Adapter(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(32, 4), nn.Linear(4, 32)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = pair()
    model.b = Adapter(model.b)
    report = tritonfp8.verify(model, x())
    assert report.layers.keys() == {"a", "b.base"}


def test_a_layer_that_was_reverted_is_no_failure():
    model = pair()
    tritonfp8.revert(model.b)
    assert tritonfp8.verify(model, x()).layers.keys() == {"a"}
    tritonfp8.convert(model.b, "tensorwise")
    model.b = nn.Linear(32, 32)
    assert failures(model).keys() == {"b"}
    tritonfp8.revert(model)
    with pytest.raises(ValueError, match="no converted layer"):
        tritonfp8.verify(model, x())


def test_a_converted_conv1d_is_verified_as_a_linear_layer_is():
    from transformers.pytorch_utils import Conv1D

    model = nn.Sequential(Conv1D(64, 32), nn.Linear(64, 32))
    tritonfp8.convert(model, "rowwise")
    report = tritonfp8.verify(model, x().requires_grad_())
    assert report.layers.keys() == {"0", "1"}
    assert all(layer.calls == 1 and len(layer.gemms) == 3 for layer in report.layers.values())
    model[0] = Conv1D(64, 32)
    assert "has taken the place" in failures(model)["0"]


def test_a_layer_that_has_no_recipe():
    model = pair()
    del model.b.recipe
    check_one(model, "it has no recipe")
    model.b.recipe = "rowwise"
    check_one(model, "a str as its recipe")


def test_a_gpu_that_is_too_old(monkeypatch):
    model = pair()
    old_gpu(monkeypatch)
    found = failures(model)
    assert found.keys() == {"a", "b"}
    assert "NVIDIA A100 (sm_80) has no FP8 tensor cores" in found["a"]


def test_layers_that_a_recipe_keeps_in_bf16_are_no_failure(monkeypatch):
    model = pair(recipe={"a": "bf16", "b": "tensorwise"})
    old_gpu(monkeypatch)
    assert failures(model).keys() == {"b"}


def test_dtypes_that_differ_are_an_error_of_the_layer():
    """bf16 weights with float32 inputs need autocast: without it the layer raises, and computes nothing else."""
    model = pair().bfloat16()
    with pytest.raises(TypeError, match="Cast one, or use torch.autocast"):
        tritonfp8.verify(model, x())
    with torch.autocast("cpu", torch.bfloat16):
        assert tritonfp8.verify(model, x()).ok


def test_a_warning_in_place_of_an_error():
    with pytest.warns(UserWarning, match="b: it was never called") as caught:
        report = tritonfp8.verify(pair(lambda self, x: x), x(), on_failure="warn")
    assert caught[0].filename == __file__
    assert [each.layer for each in report.failures] == ["b"]
    assert "1 of 2 converted layers fail" in report.summary
    assert report.message().startswith("1 of 2 converted layers do not run in FP8:\n  b: ")
    report = tritonfp8.verify(pair(), x())
    assert report.message() == f"all 2 converted layers run as their recipes say: {report.summary}"


def test_a_layer_with_two_causes_counts_once():
    failures = (Failure("b", "first", "do this"), Failure("b", "second", "do that"))
    report = VerificationReport({}, {}, (*failures, Failure("a", "third", "do these")), True)
    assert report.message().splitlines()[0] == "2 of 2 converted layers do not run in FP8:"
    assert len(report.message().splitlines()) == 4
    assert "2 of 2 converted layers fail" in report.summary
