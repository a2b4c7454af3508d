"""The predictions that are kept as data: how steps scale, and eight GPUs to be compared with a measurement."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bench.scale.check import nvlink_of_two
from bench.scale.compute import BF16
from bench.scale.network import Network
from bench.scale.step import Layout, predict
from bench.scale.traffic import RECIPES

GPUS = tuple(8 << n for n in range(9))
# Sequences of a data-parallel rank, tokens of a sequence, and what backward computes again.
SMALL, FEW, LONG, LARGE = (1, 8192, "none"), (1, 2048, "none"), (1, 8192, "full"), (4, 8192, "full")
MIXTURE = (4, 4096, "none")
# Layers of the mixture that a machine trains without computing again.
SOME = 24


class Run(NamedTuple):
    """A prediction to make: a series of the figure, and the arguments of :func:`bench.scale.step.predict`."""

    series: str
    model: str
    recipe: str
    layout: Layout
    batch: int
    sequence: int
    recompute: str
    nvlink: float | None = None
    layers: int = 0

    def row(self, network: Network) -> dict[str, Any]:
        """The predicted row, over the links of ``network`` but for ``nvlink``."""
        name, recipe, layout, batch, sequence, recompute, nvlink, layers = self[1:]
        if nvlink is not None:
            network = dataclasses.replace(network, nvlink=nvlink)
        found = predict(name, recipe, layout, batch, sequence, network, recompute, layers)
        return {"series": self.series, **found}


def _shared(gpus: int, codes: bool) -> Layout:
    return Layout(gpus, shard=min(64, gpus), gather=codes)


def _dense() -> Iterator[Run]:
    """Llama-3 8B: every rank shares the parameters, or eight do."""
    for gpus in GPUS:
        for recipe in (BF16, *RECIPES):
            codes = recipe != BF16
            yield Run("FSDP2", "llama3-8b", recipe, Layout(gpus, gather=codes), *SMALL)
            yield Run("HSDP, 8 ranks share", "llama3-8b", recipe, Layout(gpus, shard=8, gather=codes), *SMALL)
            yield Run("FSDP2, 2,048 tokens", "llama3-8b", recipe, Layout(gpus, gather=codes), *FEW)
            yield Run("HSDP, 64 ranks share, 2,048 tokens", "llama3-8b", recipe, _shared(gpus, codes), *FEW)
        for recipe in RECIPES:
            yield Run("FSDP2, bf16 gather", "llama3-8b", recipe, Layout(gpus), *SMALL)
            yield Run("FSDP2, no reshard", "llama3-8b", recipe, Layout(gpus, gather=True, reshard=False), *SMALL)
        by_layer = Layout(gpus, gather=True, amax="layer")
        yield Run("FSDP2, a reduction a layer", "llama3-8b", "tensorwise", by_layer, *SMALL)


def _large() -> Iterator[Run]:
    """Llama-3 70B: tensor parallelism inside a machine, or 64 ranks that share the parameters."""
    for gpus in GPUS[3:]:
        for recipe in (BF16, *RECIPES):
            codes = recipe != BF16
            yield Run("FSDP2", "llama3-70b", recipe, Layout(gpus, gather=codes), *LONG)
            yield Run("FSDP2 x TP = 8", "llama3-70b", recipe, Layout(gpus, tp=8, gather=codes), *LARGE)
            yield Run("HSDP, 64 ranks share", "llama3-70b", recipe, Layout(gpus, shard=64, gather=codes), *LONG)


def _mixture() -> Iterator[Run]:
    """Qwen3-30B-A3B: experts over the ranks of a machine."""
    for gpus in GPUS:
        for recipe in (BF16, "rowwise", "blockwise"):
            codes = recipe != BF16
            for ep in (1, 8):
                layout = Layout(gpus, ep=ep, gather=codes)
                yield Run(f"FSDP2, EP = {ep}", "qwen3-30b-a3b", recipe, layout, *MIXTURE)


def scaling() -> Iterator[Run]:
    """Three models on 8 to 2,048 GPUs."""
    yield from _dense()
    yield from _large()
    yield from _mixture()


def eight() -> Iterator[Run]:
    """Eight GPUs: settings of published tables and of torchtitan, and experts over four ranks."""
    for recipe in (BF16, *RECIPES):
        for gather in sorted({False, recipe != BF16}):
            yield Run("FSDP2", "llama3-8b", recipe, Layout(8, gather=gather), 1, 8192, "selective")
    # NCCL's model of a machine, and what two GPUs measured.
    for nvlink, of in ((None, ""), (nvlink_of_two(), ", NVLink of two GPUs")):
        for recipe in (BF16, *RECIPES):
            yield Run(f"TP = 8{of}", "llama3-8b", recipe, Layout(8, tp=8), 12, 8192, "selective", nvlink)
        for recipe in (BF16, "rowwise", "blockwise"):
            layout = Layout(8, ep=4, gather=recipe != BF16)
            yield Run(f"FSDP2 x EP = 4{of}", "qwen3-30b-a3b", recipe, layout, *MIXTURE, nvlink)
        # The default sizes of torchtitan, and of bench.distributed.experts.
        for tp, recipe in itertools.product((2, 8), (BF16, *RECIPES)):
            layout = Layout(8, tp=tp, gather=tp < 8 and recipe != BF16)
            series = f"TP = {tp}{' x FSDP2' * (tp < 8)}, one sequence{of}"
            yield Run(series, "llama3-8b", recipe, layout, 1, 8192, "selective", nvlink)
        for recipe in (BF16, "rowwise", "blockwise"):
            layout = Layout(8, ep=4, gather=recipe != BF16)
            series = f"FSDP2 x EP = 4, {SOME} layers{of}"
            yield Run(series, "qwen3-30b-a3b", recipe, layout, 2, 4096, "none", nvlink, SOME)


RUNS: Mapping[str, Callable[[], Iterator[Run]]] = {"scaling": scaling, "eight": eight}
"""The sets of predictions, by the name of their file."""
