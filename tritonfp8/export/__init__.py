"""Checkpoints in FP8 that other engines read: written from a model, read into one.

    report = tritonfp8.export.save(model, folder, "fine_grained")
    report = tritonfp8.export.load(model, folder)
    report = tritonfp8.export.load_tensors(model, tritonfp8.export.tensors(trained, "fine_grained"), "fine_grained")

checkpoint_formats   how a layer's codes and scales are named and shaped, as data
places               the tensors of a model: where each lies, and which are tied
choice               the layers that are exported, and the reasons for the others
permanent            weights that a model computes, and adapters, as they are once that is made permanent
stream               plan and tensors: what is written, one layer at a time
writing              save: files that are whole or absent
configs              the quantization config of a checkpoint that is read
files                safetensors files and their index
matching             which tensor of a checkpoint goes where in a model; none is left over
reading              load and load_tensors: weights into a model, codes as codes where it stores them
report               ExportReport and LoadReport
"""

from tritonfp8.export.checkpoint_formats import CHECKPOINT_FORMATS, CheckpointFormat, checkpoint_format
from tritonfp8.export.configs import specs_of
from tritonfp8.export.files import CONFIG, ENTRY, INSIDE, OURS, Stored
from tritonfp8.export.matching import CODES, check_names, check_patterns, matches, patterns_of
from tritonfp8.export.reading import load, load_any, load_tensors
from tritonfp8.export.report import ExportedLayer, ExportReport, LoadedLayer, LoadReport
from tritonfp8.export.stream import TensorStream, plan, tensors
from tritonfp8.export.writing import attempt, save, settled

__all__ = [
    "CHECKPOINT_FORMATS",
    "CheckpointFormat",
    "ExportReport",
    "ExportedLayer",
    "LoadReport",
    "LoadedLayer",
    "TensorStream",
    "load",
    "load_tensors",
    "plan",
    "save",
    "tensors",
]
