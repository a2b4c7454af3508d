"""tritonfp8.verify assigns each GEMM to its layer, and changes nothing of the model."""

import collections
import copy
import dataclasses
import io
import logging
import random
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.cli import app
from tritonfp8.compat import counting, hardware
from tritonfp8.recipes import GEMMS

M = 16


class Siblings(nn.Module):
    """Layers that share an input, one that is called twice, and one that is not converted."""

    def __init__(self, recompute=None):
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.q, self.k = nn.Linear(64, 48), nn.Linear(64, 48)
        self.shared = nn.Linear(48, 48)
        self.head = nn.Linear(48, 8)
        self.recompute = recompute

    def block(self, x):
        return self.shared(F.relu(self.shared(self.q(x) * self.k(x))))

    def forward(self, x):
        x = self.first(x)
        x = self.block(x) if self.recompute is None else checkpoint(self.block, x, use_reentrant=self.recompute)
        return self.head(x)


def flops(m, n, k):
    return 2 * m * n * k


def two(recipe="tensorwise"):
    return converted(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), recipe)


def converted(model, recipe="tensorwise", **options):
    tritonfp8.convert(model, recipe, **options)
    return model


@pytest.mark.parametrize("recompute", [None, False, True])
def test_each_gemm_belongs_to_its_layer(recompute):
    """torch's module tracker assigns the GEMMs of siblings, and of recomputed layers, to the wrong modules."""
    model = converted(Siblings(recompute))
    report = tritonfp8.verify(model, torch.randn(M, 32))
    # The forward of checkpointed layers runs twice, their backward once.
    passes = {"output": 1 if recompute is None else 2, "grad_input": 1, "grad_weight": 1}
    for name, calls in {"q": 1, "k": 1, "shared": 2}.items():
        layer, found = getattr(model, name), report.layers[name]
        assert found.calls == calls * passes["output"]
        assert {gemm: each.calls for gemm, each in found.gemms.items()} == {g: calls * n for g, n in passes.items()}
        for each in found.gemms.values():
            assert each.flops == each.calls * flops(M, layer.out_features, layer.in_features)
    assert report.layers["first"].gemms.keys() == {"output", "grad_weight"}
    assert report.layers["q"].gemms["grad_weight"].dtype == "e5m2 x e4m3"
    assert report.layers["q"].gemms["output"].op == "tritonfp8.scaled_matmul"
    assert report.ok
    assert report.backward


def test_shares_are_those_of_all_gemms_that_read_a_weight():
    model = converted(Siblings())
    report = tritonfp8.verify(model, torch.randn(M, 32))
    linear = 3 * (2 * flops(M, 64, 48) + 2 * flops(M, 48, 48) + flops(M, 48, 8)) + 2 * flops(M, 64, 32)
    assert report.others.keys() == {"head.weight"}
    assert report.others["head.weight"].flops == 3 * flops(M, 48, 8)
    assert report.others["head.weight"].share == pytest.approx(3 * flops(M, 48, 8) / linear)
    total = sum(layer.share for layer in report.layers.values()) + report.others["head.weight"].share
    assert total == pytest.approx(1)
    assert report.fp8_share == pytest.approx(1 - report.others["head.weight"].share)


def test_the_flops_of_other_layers_count_once_with_checkpointing_and_autocast():
    model = converted(Siblings(False), filter=lambda module, name: name == "first")
    with torch.autocast("cpu", torch.bfloat16):
        report = tritonfp8.verify(model, torch.randn(M, 32))
    # Two forwards and two gradients.
    assert report.others["q.weight"].flops == 4 * flops(M, 48, 64)
    assert report.others["head.weight"].flops == 3 * flops(M, 8, 48)
    assert "bfloat16" in " ".join(report.others["q.weight"].ops)


@pytest.mark.parametrize("recipe", recipes.names())
def test_every_recipe_shows_what_its_gemms_run(recipe):
    model = two(recipe)
    with torch.autocast("cpu", torch.bfloat16):
        report = tritonfp8.verify(model, torch.randn(M, 32))
    for gemm in GEMMS:
        found, how = report.layers["1"].gemms[gemm], getattr(recipes.get(recipe), gemm)
        assert found.kind == ("reference" if how.quantized else "high_precision")
        assert found.dtype == (f"{how.lhs.format} x {how.rhs.format}" if how.quantized else "bfloat16")
        assert found.in_8_bits == how.quantized


def test_tied_layers_are_told_apart_and_frozen_layers_run_two_gemms():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    report = tritonfp8.verify(converted(model), torch.randn(M, 32))
    assert [report.layers[name].gemms["output"].calls for name in "01"] == [1, 1]
    assert report.ok
    model = two()
    model[1].requires_grad_(False)
    assert tritonfp8.verify(model, torch.randn(M, 32)).layers["1"].gemms.keys() == {"output", "grad_input"}


def test_inference_runs_the_forward_only():
    report = tritonfp8.verify(converted(Siblings()).eval(), torch.randn(M, 32), backward=False)
    assert {gemm for layer in report.layers.values() for gemm in layer.gemms} == {"output"}
    assert report.others["head.weight"].flops == flops(M, 48, 8)
    assert not report.backward


def test_a_compiled_model_runs_eagerly_and_stays_compiled():
    model = two()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    x = torch.randn(M, 32)
    compiled(x).sum().backward()
    report = tritonfp8.verify(compiled, x)
    assert report.layers["1"].gemms.keys() == set(GEMMS)
    compiled(x).sum().backward()
    assert counter.frame_count == 1


def test_keyword_arguments_and_a_loss_reach_the_model():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x, scale):
            return {"loss": self.used(x * scale).sum(), "logits": self.unused(x)}

    report = tritonfp8.verify(converted(WithLoss()), torch.randn(M, 32), scale=2)
    assert "grad_weight" in report.layers["used"].gemms
    assert report.layers["unused"].gemms.keys() == {"output"}


class OfMapping(Siblings):
    def forward(self, batch):
        return super().forward(batch["x"])


@pytest.mark.parametrize("kind", [Siblings, OfMapping])
def test_a_batch_is_a_mapping_of_keywords_if_forward_takes_them(kind):
    x = torch.randn(M, 32)
    report = tritonfp8.verify(converted(kind()), collections.UserDict(x=x))
    assert report == tritonfp8.verify(converted(Siblings()), x)


class Stateful(nn.Module):
    """State of every kind that a forward may change."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.dropout = nn.BatchNorm1d(32), nn.Linear(32, 32), nn.Dropout(0.5)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0
        self.fails = False

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        random.random()
        np.random.rand()
        out = self.linear(self.dropout(self.norm(x)))
        if self.fails:
            raise KeyError("from the model")
        return out


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_the_model_changes(fails):
    model, other = converted(Stateful()), torch.randn(M, 32)
    x = torch.randn(M, 32, requires_grad=True)
    model(other).sum().backward()
    model.linear.bias.grad = None
    model.dropout.eval()
    model.fails = fails
    stepped = []
    model.linear.weight.register_post_accumulate_grad_hook(lambda p: stepped.append(p.data.zero_()))
    grads = {name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()}
    versions = {name: p._version for name, p in model.named_parameters()}
    state = copy.deepcopy(model.state_dict())
    attributes = {name: dict(module.__dict__) for name, module in model.named_modules()}
    seeds = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    if fails:
        with pytest.raises(KeyError, match="from the model"):
            tritonfp8.verify(model, x)
    else:
        tritonfp8.verify(model, x)
    for name, p in model.named_parameters():
        assert p.grad is grads[name][0]
        assert p.grad is None or torch.equal(p.grad, grads[name][1])
        assert p._version == versions[name]
    assert x.grad is None
    assert not stepped
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: dict(module.__dict__) for name, module in model.named_modules()} == attributes
    assert torch.equal(torch.get_rng_state(), seeds[0])
    assert random.getstate() == seeds[1]
    assert (np.random.get_state()[1] == seeds[2]).all()
    # The hook is there again, and nothing is logged any more.
    model.fails = False
    model(other).sum().backward()
    assert len(stepped) == 1
    assert not counting.is_logging
    assert not counting.is_active()


def test_copies_and_pickles_are_verified_like_the_model():
    model = converted(Siblings())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        each.q = nn.Linear(64, 48)
        with pytest.raises(tritonfp8.VerificationError, match="q: a Linear has taken the place"):
            tritonfp8.verify(each, torch.randn(M, 32))
    tritonfp8.verify(model, torch.randn(M, 32))


def test_the_report_is_a_table_and_a_line_of_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="tritonfp8"):
        report = tritonfp8.verify(converted(Siblings()), torch.randn(M, 32))
    lines = str(report).splitlines()
    assert lines[0] == report.summary
    assert lines[1].split() == ["layer", "recipe", "calls", "FLOPs", *GEMMS]
    assert [line.split()[0] for line in lines[2:]] == ["first", "q", "k", "shared", "head.weight"]
    assert report.summary.startswith(f"{100 * report.fp8_share:.0f} % of the linear FLOPs run in FP8 (by the reference")
    assert [record.getMessage() for record in caplog.records] == [report.summary]


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (3, {}, TypeError, "model must be"),
        (converted(Siblings()), {"backward": 1}, TypeError, "backward must be"),
        (converted(Siblings()), {"on_failure": "ignore"}, ValueError, "on_failure must be one of 'raise', 'warn'"),
        (nn.Linear(32, 32), {}, ValueError, "use tritonfp8.convert first"),
        (converted(Siblings()).requires_grad_(False), {}, ValueError, "carries no gradient"),
    ],
)
def test_arguments_are_checked(model, options, error, message):
    with pytest.raises(error, match=message):
        tritonfp8.verify(model, torch.randn(M, 32), **options)


def test_the_command_shows_the_table():
    done = CliRunner().invoke(app.app, ["verify", "--recipe", "blockwise", "--device", "cpu", "--seq-len", "16"])
    assert done.exit_code == 0, done.output
    assert "model.layers.*.mlp.down_proj (4x)" in done.output
    # All but the head.
    share = int(re.search(r"(\d+) % of the linear FLOPs run in FP8", done.output)[1])
    assert 90 < share < 100


def test_the_command_takes_a_file_of_layers(tmp_path):
    recipes.save({"*.0.*": "tensorwise", "*": "mxfp8"}, tmp_path / "layers.toml")
    options = ["verify", "--recipe", str(tmp_path / "layers.toml"), "--device", "cpu", "--seq-len", "16", "--inference"]
    done = CliRunner().invoke(app.app, options)
    assert "tensorwise" in done.output
    assert "mxfp8" in done.output
    (tmp_path / "layers.toml").write_text("layers = 3")
    wrong = CliRunner().invoke(app.app, options)
    assert wrong.exit_code == 2
    assert "layers must be a table" in wrong.output


def test_the_command_fails_where_a_layer_does(monkeypatch):
    abilities = dataclasses.replace(hardware.CPU, name="NVIDIA A100", capability=(8, 0), has_fp8_mma=False)
    monkeypatch.setattr(hardware, "abilities", lambda device: abilities)
    done = CliRunner().invoke(app.app, ["verify", "--device", "cpu", "--seq-len", "16", "--inference"])
    assert done.exit_code == 1
    assert "NVIDIA A100 (sm_80) has no FP8 tensor cores" in done.output
    wrong = CliRunner().invoke(app.app, ["verify", "--device", "cuda:99"])
    assert wrong.exit_code == 2
