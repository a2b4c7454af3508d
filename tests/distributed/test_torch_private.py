"""A torch without a name that we need, though it is private, is an error at the beginning, which says which."""

import ast
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather, torch_private
from tritonfp8.distributed.fsdp.torch_fsdp import Managed
from tritonfp8.distributed.torch_private import FSDP, TENSOR_PARALLEL, require_names

PLACES = {**TENSOR_PARALLEL, **FSDP}
GUARDED = {alternative for names in PLACES.values() for name in names for alternative in name.split("|")}
# Documented for those who extend torch, or not torch's.
PUBLIC = {
    "_make_wrapper_subclass", "_schema", "_ops", "_C", "_replace", "_asdict", "_pin_memory", "_to_copy",
    "_c10d_functional",
}  # fmt: skip


def model():
    found = nn.Sequential(nn.Linear(32, 32))
    tritonfp8.convert(found, "rowwise")
    return found


def test_missing_name_is_an_error_of_enable_float8_all_gather(monkeypatch):
    enable_float8_all_gather(model())
    monkeypatch.delattr(FSDPModule, "_get_fsdp_state")
    with pytest.raises(RuntimeError, match="enable_float8_all_gather") as error:
        enable_float8_all_gather(model())
    for words in ("torch.distributed.fsdp.FSDPModule._get_fsdp_state", torch.__version__, torch_private.TESTED):
        assert words in str(error.value)


def test_missing_name_is_an_error_of_the_import(monkeypatch):
    importlib.reload(torch_private)
    monkeypatch.delattr(ColwiseParallel, "_prepare_input_fn")
    with pytest.raises(RuntimeError, match=r"^tritonfp8.distributed uses .*ColwiseParallel._prepare_input_fn"):
        importlib.reload(torch_private)


@pytest.mark.parametrize("place", PLACES)
def test_every_name_is_looked_for_where_it_is(place):
    require_names("test", {place: PLACES[place]})
    renamed = tuple(f"{name.split('|')[0]}_renamed" for name in PLACES[place])
    with pytest.raises(RuntimeError) as error:
        require_names("test", {place: renamed})
    assert all(name in str(error.value) for name in renamed)


def test_missing_module_or_class_is_named():
    with pytest.raises(RuntimeError, match="torch.distributed.fsdp._fully_shard._nowhere.FSDPParam"):
        require_names("test", {"torch.distributed.fsdp._fully_shard._nowhere:FSDPParam": ("x",)})
    with pytest.raises(RuntimeError, match="torch.distributed.fsdp.NoModule"):
        require_names("test", {"torch.distributed.fsdp:NoModule": ("x",)})


@pytest.mark.parametrize("of_param", [False, True])
def test_mixed_precision_is_of_the_group_or_of_each_parameter(of_param):
    """Of its group before torch 2.15; since then a group may hold parameters of several dtypes, and knows none."""
    group, param = SimpleNamespace(), SimpleNamespace()
    (param if of_param else group).mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert Managed(group, param).param_dtype is torch.bfloat16


def test_a_name_may_be_in_another_place():
    place = "torch.nn:Linear"
    require_names("test", {place: ("nothing|torch.nn:Module._parameters",)})
    with pytest.raises(RuntimeError, match=r"torch.nn.Linear.nothing or torch.nn.Module.no_such"):
        require_names("test", {place: ("nothing|torch.nn:Module.no_such",)})


def _trees():
    folder = Path(torch_private.__file__).parent
    return [ast.parse(path.read_text()) for path in sorted(folder.glob("*.py"))]


def _our_own(trees):
    """Names that the subpackage itself defines: functions, fields and what methods set."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target).removeprefix("self.")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def test_every_private_name_that_is_used_is_guarded():
    trees = _trees()
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    private = {node.attr for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")}
    of_fsdp = {
        node.attr for node in attributes
        if ast.unparse(node.value).endswith((".group", ".param", ".mesh_info")) and not node.attr.startswith("__")
    }  # fmt: skip
    assert {"_local_tensor", "_training_state", "sharded_param", "mp_policy"} <= private | of_fsdp
    unguarded = (private - set(_our_own(trees)) - PUBLIC) | (of_fsdp - {"size", "hooks_of"})
    assert not unguarded - GUARDED, "add them to tritonfp8/distributed/private_names.py"
