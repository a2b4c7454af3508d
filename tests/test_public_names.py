"""Each public name has one import path and one place on the API page, and no module of a model is imported unasked."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys

import pytest
from architecture import ROOT

import tritonfp8

NAMES = {
    "tritonfp8": (
        "ConversionReport", "Float8Experts", "Float8Linear", "QuantSpec", "Quantized", "QuantizedGroups", "Recipe",
        "RecipeSchedule", "VerificationError", "VerificationReport", "__version__", "advise", "convert", "dequantize",
        "monitor", "quantize", "quantize_both", "quantize_weights_once", "quantized_init", "revert",
        "scaled_grouped_matmul", "scaled_matmul", "sensitivity", "swap_recipe", "verify", "verify_training",
    ),
    "tritonfp8.advice": ("Advice", "Recommendation", "plot"),
    "tritonfp8.recipes": (
        "GEMMS", "Gemm", "OPERANDS", "bf16", "blockwise", "describe", "get", "load", "mxfp4_weights", "mxfp8", "names",
        "rowwise", "rowwise_hp_grad_weight", "save", "summary", "tensorwise",
    ),
    "tritonfp8.functional": (
        "SharedInput", "amax", "grouped_linear", "linear", "quantize_groups", "quantize_matrices", "quantize_weight",
    ),
    "tritonfp8.export": (
        "CHECKPOINT_FORMATS", "CheckpointFormat", "ExportReport", "ExportedLayer", "LoadReport", "LoadedLayer", "load",
        "TensorStream", "load_tensors", "plan", "save", "tensors",
    ),
    "tritonfp8.rollout": (
        "Checked", "ENGINE_NAMES", "EngineName", "Generated", "Receiver", "Rollout", "check", "log_probs",
        "make_exact", "send", "why_inexact",
    ),
    "tritonfp8.distributed": (
        "Float8ColwiseParallel", "Float8RowwiseParallel", "OrderedGradients", "PrepareFloat8ModuleInput",
        "clip_grad_norm_", "count_collective_bytes", "enable_float8_all_gather", "enable_float8_reduce_scatter",
        "scales", "shard_experts", "sharded_linear", "token_counts",
    ),
    "tritonfp8.integrations.transformers": (
        "Float8Callback", "Float8Config", "StoredWeightsConfig", "from_pretrained", "restore",
    ),
    "tritonfp8.integrations.lightning": ("fabric_plugin", "trainer_plugin"),
    "tritonfp8.integrations.torchtitan": ("Float8Converter", "Float8SelectiveAC"),
    "tritonfp8.integrations.torchao": ("TritonFP8Config",),
    "tritonfp8.optim": ("AdamW", "DirectSteps", "direct_steps", "float32_copy", "with_masters"),
    "tritonfp8.layers.stored": ("StoredWeight", "store"),
    "tritonfp8.workflow.health": ("FIELDS", "Finding", "Monitor", "Sensitivity", "THRESHOLDS", "Threshold"),
    "tritonfp8.warmup": ("warm_up",),
    "tritonfp8.compat.counting": ("count_gemms",),
    "tritonfp8.reference": (
        "adamw", "adamw_amax", "amax", "dequantize", "matmul", "quantize", "quantize_both", "quantize_both_sum",
        "quantize_weights", "quantize_with_amax", "scaled_matmul", "transpose",
    ),
    "tritonfp8.specs.testing": ("assert_bitwise_equal", "assert_matmul_close", "sqnr", "worst_tile_sqnr"),
    "tritonfp8.specs.formats": ("FORMATS", "Format", "SCALE_FORMATS"),
    "tritonfp8.compat.hardware": ("abilities", "machine_key"),
}  # fmt: skip
# Parts of the package that are attributes of it.
PARTS = {"distributed", "export", "optim", "recipes", "rollout"}
# These list in `__all__` what other folders read, too.
INTERNAL_TOO = {"tritonfp8.advice", "tritonfp8.warmup"}
# The text that examples train on.
OF_EXAMPLES = {"tritonfp8.training.corpus"}
DIRECTIVE = r"^\.\. (auto|py:)(function|class|exception|data|module):: (\S+)(?:\n   :members: ((?:.|\n      )+))?"
CLIENTS = {f"tritonfp8.integrations.{name}": name for name in ("lightning", "torchao", "torchtitan", "transformers")}


def module_of(name):
    if name in CLIENTS:
        pytest.importorskip(CLIENTS[name])
    return importlib.import_module(name)


@pytest.mark.parametrize("module", NAMES)
def test_public_names_import(module):
    found = module_of(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []
    if hasattr(found, "__all__") and module not in INTERNAL_TOO:
        assert {*found.__all__} - PARTS == {*NAMES[module]} - {"__version__"}


def test_no_object_is_public_in_two_places():
    places = {}
    for module in NAMES:
        if module not in CLIENTS:
            for name in NAMES[module]:
                places.setdefault(id(getattr(module_of(module), name)), []).append(f"{module}.{name}")
    assert [names for names in places.values() if len(names) > 1] == []


def test_the_page_has_each_name_once():
    """In the place from which it is imported: a directive names an object, or a module and its members and data."""
    found = []
    for start, kind, name, members in re.findall(DIRECTIVE, (ROOT / "docs" / "api.md").read_text(), re.M):
        if kind == "module":
            module = name
            found += [f"{module}.{member}" for member in re.split(r",\s+", members.strip())]
        else:
            # What a page describes itself stands under the module before it.
            found.append(name if start == "auto" else f"{module}.{name}")
    public = [f"{module}.{name}" for module, names in NAMES.items() for name in names if name != "__version__"]
    assert sorted(found) == sorted(public)


def test_convert_is_no_module():
    assert [*ROOT.glob("tritonfp8/**/convert.py"), *ROOT.glob("tritonfp8/**/convert/")] == []
    assert inspect.isfunction(tritonfp8.convert)


def programs():
    """The Python of the pages, examples and notebooks by file, a block or a cell each."""
    for path in [ROOT / "README.md", *ROOT.glob("docs/*.md")]:
        for block in re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S):
            yield path, block
    for path in ROOT.glob("examples/*.py"):
        yield path, path.read_text()
    for path in ROOT.glob("notebooks/*.ipynb"):
        for cell in json.loads(path.read_text())["cells"]:
            if cell["cell_type"] == "code":
                yield path, re.sub(r"^[%!].*", "", "".join(cell["source"]), flags=re.M)


def test_programs_import_public_names_from_their_place():
    public = {f"{module}.{name}" for module, names in NAMES.items() for name in names} | OF_EXAMPLES | {*NAMES}
    imported = {}
    for path, code in programs():
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tritonfp8"):
                imported.update({f"{node.module}.{alias.name}": path.name for alias in node.names})
    assert len(imported) > 10
    assert {name: path for name, path in imported.items() if name not in public} == {}


def test_an_import_brings_neither_torch_distributed_nor_stored_layers_nor_export():
    """The core does without: both cost time and memory in each process, and fail where torch lacks them."""
    code = """
import sys, torch
before = set(sys.modules)
import tritonfp8
model = torch.nn.Sequential(torch.nn.Linear(64, 64))
tritonfp8.convert(model, "rowwise")
model(torch.ones(2, 64)).sum().backward()
tritonfp8.swap_recipe(model, "blockwise")
tritonfp8.revert(model)
unasked = ("tritonfp8.distributed", "tritonfp8.export", "tritonfp8.rollout", "tritonfp8.workflow", "safetensors")
print(sorted(m for m in set(sys.modules) - before if m.startswith(unasked)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
