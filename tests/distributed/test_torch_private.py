"""A torch without a name that we need, though it is private, is an error at the beginning, which says which."""

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel

import tritonfp8
from tritonfp8.distributed import enable_float8_all_gather, torch_private
from tritonfp8.distributed.fsdp import torch_fsdp
from tritonfp8.distributed.fsdp.torch_fsdp import Managed
from tritonfp8.distributed.torch_private import (
    BASE,
    FSDP,
    GROUP,
    MESH_INFO,
    PARAM,
    STATE,
    PrivateName,
    require_names,
    require_of_instance,
)

GUARDED = {alternative for name in (*BASE, *FSDP) for alternative in name.name.split("|")}
# Documented for extensions of torch, or not torch's.
PUBLIC = {
    "_make_wrapper_subclass", "_schema", "_ops", "_C", "_replace", "_asdict", "_pin_memory", "_to_copy",
    "_c10d_functional",
}  # fmt: skip


def model():
    found = nn.Sequential(nn.Linear(32, 32))
    tritonfp8.convert(found, "rowwise")
    return found


@pytest.fixture(autouse=True, scope="module")
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def of_instances():
    """What FSDP2 keeps of a module that has run once, by the owner of its names."""
    module = nn.Linear(8, 8)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    module(torch.ones(1, 8))
    state = module._get_fsdp_state()
    [group] = torch_fsdp._groups(state)
    return {STATE: state, GROUP: group, MESH_INFO: group.mesh_info, PARAM: group.fsdp_params[0]}


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


def test_the_names_exist():
    """In this torch: names of classes and modules, and of the instances that FSDP2 makes."""
    require_names("test", (*BASE, *FSDP))
    owners = of_instances()
    assert owners.keys() == {name.owner for name in FSDP if name.of_instances}
    for owner, instance in owners.items():
        require_of_instance("test", owner, instance)


def test_every_name_is_looked_for_where_it_is():
    owners = of_instances()
    for name in filter(lambda name: name.is_expected, (*BASE, *FSDP)):
        renamed = name._replace(name=f"{name.name.split('|')[0]}_renamed")
        assert torch_private._is_missing(renamed, owners.get(name.owner) or torch_private._owner(name))
        if not name.of_instances:
            with pytest.raises(RuntimeError, match=re.escape(str(renamed))):
                require_names("test", [renamed])


def test_missing_name_of_an_instance_is_an_error_of_the_first_forward(monkeypatch):
    monkeypatch.setattr(torch_private, "FSDP", (PrivateName(GROUP, "_no_such", "x", of_instances=True),))
    group = of_instances()[GROUP]
    with pytest.raises(RuntimeError, match=r"^enable_float8_all_gather uses .*FSDPParamGroup._no_such"):
        list(torch_fsdp._owners(group))


def test_missing_module_or_class_is_named():
    nowhere = PrivateName("torch.distributed.fsdp._fully_shard._nowhere:FSDPParam", "x", "")
    with pytest.raises(RuntimeError, match="torch.distributed.fsdp._fully_shard._nowhere.FSDPParam.x"):
        require_names("test", [nowhere])
    with pytest.raises(RuntimeError, match="torch.distributed.fsdp.NoModule.x"):
        require_names("test", [PrivateName("torch.distributed.fsdp:NoModule", "x", "")])


def test_a_name_is_expected_in_its_versions_only(monkeypatch):
    name = PrivateName("torch.nn:Linear", "x", "", first="2.12", last="2.14")
    for version, expected in (("2.11.0", False), ("2.12.1+cpu", True), ("2.14.0a0", True), ("2.15.0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert name.is_expected is expected
    # A torch that is newer than all known ones has what the newest of them has.
    monkeypatch.setattr(torch, "__version__", "3.0.0")
    assert [each.is_expected for each in (name, name._replace(last=torch_private.NEWEST))] == [False, True]


def test_one_of_several_names_is_enough():
    require_names("test", [PrivateName("torch.nn:Module", "nothing|_parameters", "")])
    with pytest.raises(RuntimeError, match=r"torch.nn.Module.nothing or no_such"):
        require_names("test", [PrivateName("torch.nn:Module", "nothing|no_such", "")])


@pytest.mark.parametrize("of_param", [False, True])
def test_mixed_precision_is_of_the_group_or_of_each_parameter(of_param):
    """Of its group before torch 2.15; since then a group may hold parameters of several dtypes, and knows none."""
    group, param = SimpleNamespace(), SimpleNamespace()
    (param if of_param else group).mp_policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert Managed(group, param).param_dtype is torch.bfloat16


def _trees():
    folder = Path(torch_private.__file__).parent
    return [ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))]


def _our_own(trees):
    """Names that the subpackage itself defines: functions, fields and what methods set."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target).removeprefix("self.")
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _private_imports(trees):
    """Private modules, and private names, that are imported from torch."""
    for node in (node for tree in trees for node in ast.walk(tree)):
        names = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        yield from (name for name in names if name.startswith("torch.") and "._" in name)


def test_every_private_import_is_in_the_table():
    modules = {name.owner.replace(":", ".").strip(".") for name in (*BASE, *FSDP)}
    found = set(_private_imports(_trees()))
    assert "torch.distributed._composable_state._module_state_mapping" in found
    assert [name for name in found if not {name, name.rpartition(".")[0]} & modules] == []


def test_every_private_name_that_is_used_is_guarded():
    trees = _trees()
    attributes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    private = {node.attr for node in attributes if node.attr.startswith("_") and not node.attr.startswith("__")}
    of_fsdp = {
        node.attr for node in attributes
        if ast.unparse(node.value).endswith((".group", ".param", ".mesh_info")) and not node.attr.startswith("__")
    }  # fmt: skip
    assert {"_local_tensor", "_training_state", "sharded_param", "mp_policy"} <= private | of_fsdp
    unguarded = (private - set(_our_own(trees)) - PUBLIC) | (of_fsdp - {"size", "gather_hooks"})
    assert not unguarded - GUARDED, "add them to tritonfp8/distributed/torch_private.py"
