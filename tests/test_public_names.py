"""Names that users script against import from where they always did, and no module of a model is imported unasked."""

import importlib
import subprocess
import sys

import pytest

import tritonfp8

NAMES = {
    "tritonfp8": (
        "ConversionReport", "Float8Experts", "Float8Linear", "QuantSpec", "Quantized", "QuantizedGroups", "Recipe",
        "RecipeSchedule", "VerificationError", "VerificationReport", "__version__", "convert", "dequantize",
        "distributed", "export", "monitor", "quantize", "quantize_both", "quantize_weights_once", "quantized_init",
        "recipes", "revert", "scaled_grouped_matmul", "scaled_matmul", "sensitivity", "swap_recipe", "verify",
        "verify_training",
    ),
    "tritonfp8.conversion": ("ConversionReport", "convert", "revert", "swap_recipe"),
    "tritonfp8.compat.counting": ("count_gemms",),
    "tritonfp8.distributed": (
        "Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput", "count_collective_bytes",
        "enable_float8_all_gather", "scales", "shard_experts", "sharded_linear", "token_counts",
    ),
    "tritonfp8.export": (
        "CHECKPOINT_FORMATS", "CheckpointFormat", "ExportReport", "ExportedLayer", "LoadReport", "LoadedLayer", "load",
        "plan", "save", "tensors",
    ),
    "tritonfp8.specs.formats": ("FORMATS", "SCALE_FORMATS", "Format"),
    "tritonfp8.functional": (
        "Operands", "SharedInput", "amax", "dequantize", "linear", "quantize", "quantize_both", "quantize_weight",
        "scaled_matmul",
    ),
    "tritonfp8.compat.hardware": ("abilities", "machine_key"),
    "tritonfp8.specs.quantized": ("Quantized",),
    "tritonfp8.recipes": ("Gemm", "Recipe", "describe", "get", "load", "names", "save", "summary"),
    "tritonfp8.reference": ("amax", "dequantize", "matmul", "quantize", "quantize_both", "scaled_matmul", "transpose"),
    "tritonfp8.specs": ("QuantSpec",),
    "tritonfp8.specs.testing": ("assert_bitwise_equal", "assert_matmul_close", "sqnr", "worst_tile_sqnr"),
    "tritonfp8.warmup": ("warm_up",),
}  # fmt: skip


@pytest.mark.parametrize("module", NAMES)
def test_public_names_import(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module] if not hasattr(found, name)] == []


def test_the_package_lists_its_names():
    assert {*tritonfp8.__all__, "__version__", "distributed", "export"} == set(NAMES["tritonfp8"])


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
unasked = ("tritonfp8.distributed", "tritonfp8.export", "tritonfp8.workflow", "safetensors")
print(sorted(m for m in set(sys.modules) - before if m.startswith(unasked)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
