"""FLOP counters of others count a converted layer as the linear layer that it is, if they were imported before."""

import sys
import types

import pytest
from cases import each_recipe, normal
from torch import nn

from tritonfp8 import Float8Linear, convert


def model():
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))


@each_recipe
def test_their_tables_get_an_entry(monkeypatch, recipe):
    hooks, ops = {nn.Linear: object()}, {"aten::linear": object()}
    monkeypatch.setitem(sys.modules, "thop.profile", types.SimpleNamespace(register_hooks=hooks))
    monkeypatch.setitem(sys.modules, "fvcore.nn.flop_count", types.SimpleNamespace(_DEFAULT_SUPPORTED_OPS=ops))
    convert(model(), recipe)
    assert hooks[Float8Linear] is hooks[nn.Linear]
    assert ops["tritonfp8::whole_linear"] is ops["aten::linear"]


@pytest.mark.parametrize("tables", [types.SimpleNamespace(), types.SimpleNamespace(register_hooks={})])
def test_another_version_of_them_changes_nothing(monkeypatch, tables):
    monkeypatch.setitem(sys.modules, "thop.profile", tables)
    assert convert(model(), "rowwise").converted


def test_thop():
    thop = pytest.importorskip("thop")
    converted = model()
    convert(converted, "rowwise")
    x = normal(3, 64)
    assert thop.profile(converted, (x,), verbose=False) == thop.profile(model(), (x,), verbose=False)


def test_fvcore():
    fvcore = pytest.importorskip("fvcore.nn")
    converted = model()
    convert(converted, "rowwise")
    found, plain = (fvcore.FlopCountAnalysis(each, normal(3, 64)) for each in (converted, model()))
    assert found.total() == plain.total() > 0
