"""GEMMs that a step calls, as a warm-up tunes and compiles them: their keys, configurations, operands and results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import tritonfp8
from tritonfp8 import launch, reference, tuning
from tritonfp8.compat import hardware
from tritonfp8.functional import quantize_groups, quantize_matrices
from tritonfp8.specs import QuantSpec, matmul_family, spec_of
from tritonfp8.specs.quantized import Quantized
from tritonfp8.tuning import Key, MatmulConfig
from tritonfp8.tuning.grouped_tiles import GroupedGemm
from tritonfp8.warmup.record import Call, Layout

MATMUL, GROUPED_MATMUL = "scaled_matmul", "scaled_grouped_matmul"
MAX_CANDIDATES = 12
# Sizes of the groups that are measured, over their mean: a router that is trained to balance its experts reaches that.
LEAST_SHARE, MOST_SHARE = 0.5, 1.5

_LAUNCHES: Mapping[str, Callable[..., Tensor]] = {
    MATMUL: launch.gemms.scaled_matmul,
    GROUPED_MATMUL: launch.gemms.scaled_grouped_matmul,
}
_REFERENCES: Mapping[str, Callable[..., Tensor]] = {
    MATMUL: reference.scaled_matmul,
    GROUPED_MATMUL: reference.scaled_grouped_matmul,
}


@dataclass(frozen=True)
class _AnyGemmCall:
    """A call of an op that multiplies, with the key of its tuned configuration."""

    call: Call
    key: Key

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the result."""
        return self.call.named()["out_dtype"] or torch.bfloat16

    def run(self, args: Sequence[Any], config: MatmulConfig, out: Tensor | None = None) -> Tensor:
        """The result in a configuration, in ``out`` if it is given.

        On a CPU every configuration runs the reference, so that the steps around it can be tried out there.
        """
        if args[0].device.type == "cpu":
            return _REFERENCES[self.call.op](*args)
        return _LAUNCHES[self.call.op](*args, config=config, out=out)

    def expected(self, args: Sequence[Any]) -> Tensor:
        """The result in float32, by the reference."""
        named = zip(self.call.named(), args, strict=True)
        return _REFERENCES[self.call.op](*(torch.float32 if name == "out_dtype" else arg for name, arg in named))

    def has_configurations(self, device: torch.device) -> bool:
        """Whether a launch chooses a configuration by the key."""
        return True

    def sizes(self) -> str:
        """The sizes, for messages."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{self.key.kind.family} {self.key.kind.accumulation} {self.sizes()}"


@dataclass(frozen=True)
class GemmCall(_AnyGemmCall):
    """A call of ``scaled_matmul``."""

    m: int

    def sizes(self) -> str:
        """M, N and K."""
        return f"[{self.m}, {self.key.n}, {self.key.k}]"

    @classmethod
    def of(cls, call: Call, device: torch.device) -> GemmCall:
        """The GEMM that ``call`` runs on ``device``."""
        given = call.named()
        m, k = given["a"].shape
        n = given["b"].shape[0]
        a_block, b_block = (spec_of(given[name]).block for name in ("a_spec", "b_spec"))
        matrices = (given["a"], given["b"], Layout((m, n), (n, 1), 0, given["out_dtype"]))
        kind = tuning.kind(
            matmul_family(a_block, b_block),
            given["accumulation"],
            (a_block[0], b_block[0]),
            given["out_dtype"].itemsize,
            given["activation"] is None and given["residual"] is None,
            hardware.abilities(device).has_tma and all(map(_has_tma_layout, matrices)),
        )
        return cls(call, tuning.key(kind, m, n, k), m)

    def has_configurations(self, device: torch.device) -> bool:
        """Whether a launch chooses a configuration by this M.

        torch's GEMM of MX operands that were converted has none; a batch-invariant GEMM has another M's configuration.
        """
        if self.call.named()["batch_invariant"]:
            return False
        return self.key.kind.family != "mx" or not tuning.is_widened(self.m, hardware.abilities(device).has_native_mx)

    def candidates(self, device: torch.device) -> list[MatmulConfig]:
        """The configurations worth measuring, the most promising first."""
        runnable = tuning.candidates(self.key.kind, self.m, self.key.n, self.key.k, hardware.abilities(device))
        return runnable[:MAX_CANDIDATES]

    def chosen(self, device: torch.device) -> MatmulConfig:
        """The configuration that a launch would use now."""
        kind = self.key.kind
        return tuning.choose(
            kind.family, kind.accumulation, (kind.a_rows, kind.b_rows), self.m, self.key.n, self.key.k,
            kind.out_itemsize, kind.bare, kind.copy_engine, hardware.abilities(device),
        )  # fmt: skip

    def operands(self, device: torch.device) -> list[Any]:
        """The call's arguments with random normal data: on zeros and ones a GPU draws less power and runs faster."""
        generator = torch.Generator(device).manual_seed(0)
        given = self.call.named()
        values = dict(given)
        for name in ("a", "b"):
            q = _normal_quantized(given[name], spec_of(given[f"{name}_spec"]), generator, device)
            values |= {name: q.qdata, f"{name}_scale": q.scale}
        for name in ("bias", "residual"):
            if given[name] is not None:
                values[name] = torch.randn(given[name].shape, generator=generator, device=device).to(given[name].dtype)
        return list(values.values())


@dataclass(frozen=True)
class GroupedGemmCall(_AnyGemmCall):
    """A call of ``scaled_grouped_matmul``."""

    gemm: GroupedGemm

    def sizes(self) -> str:
        """Tokens, experts, and the sizes of the matrix of each."""
        purpose = "grad_weight" if self.gemm.sums_tokens else "rows"
        return f"{purpose} {[self.gemm.tokens, self.gemm.groups, *self.gemm.sizes]}"

    @classmethod
    def of(cls, call: Call, device: torch.device) -> GroupedGemmCall:
        """The GEMM that ``call`` runs on ``device``."""
        given = call.named()
        a, b, (groups,) = given["a"], given["b"], given["offsets"].shape
        blocks = [spec_of(given[name]).block for name in ("a_spec", "b_spec")]
        family = matmul_family(*blocks)
        out_dtype = given["out_dtype"] or torch.bfloat16
        sums_tokens = len(b.shape) == 2
        n = b.shape[-2]
        shape = (groups, a.shape[0], n) if sums_tokens else (a.shape[0], n)
        out = Layout(shape, torch.empty(shape, device="meta").stride(), 0, out_dtype)
        gemm = GroupedGemm(
            family,
            given["accumulation"],
            (blocks[0][0], blocks[1][0]),
            groups,
            given["tokens"] if sums_tokens else a.shape[0],
            (a.shape[0], n) if sums_tokens else (n, a.shape[1]),
            sums_tokens,
            out_dtype.itemsize,
        )
        addressable = family != "mx" and all(_has_tma_layout(_as_matrix(each)) for each in (a, b, out))
        return cls(call, tuning.grouped_key(gemm, hardware.abilities(device).has_tma and addressable), gemm)

    def candidates(self, device: torch.device) -> list[MatmulConfig]:
        """The configurations worth measuring, the most promising first."""
        abilities = hardware.abilities(device)
        specialized = self.key.kind.copy_engine and abilities.has_warpgroup_mma
        return tuning.grouped_tiles.candidates(self.gemm, abilities, specialized)

    def chosen(self, device: torch.device) -> MatmulConfig:
        """The configuration that a launch would use now."""
        return tuning.choose_grouped(self.gemm, hardware.abilities(device), self.key.kind.copy_engine)

    def operands(self, device: torch.device) -> list[Any]:
        """The call's arguments with random normal data, in groups of different sizes."""
        generator = torch.Generator(device).manual_seed(0)
        given = self.call.named()
        values = dict(given)
        tokens, groups = self.gemm.tokens, self.gemm.groups
        shares = torch.linspace(LEAST_SHARE, MOST_SHARE, groups, dtype=torch.float64).cumsum(0)
        offsets = (shares / shares[-1] * tokens).round().to(torch.int32).to(device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        for name in ("a", "b"):
            spec, shape = spec_of(given[f"{name}_spec"]), given[name].shape
            if self.gemm.sums_tokens:
                q = quantize_groups(normal(tokens, shape[0]), offsets, spec, transpose=True)
            elif name == "a":
                q = quantize_groups(normal(*shape), offsets, spec)
            else:
                q = quantize_matrices(normal(*shape), spec)
            values |= {name: q.qdata, f"{name}_scale": q.scale}
        if given["bias"] is not None:
            values["bias"] = normal(*given["bias"].shape).to(given["bias"].dtype)
        return list({**values, "offsets": offsets}.values())


AnyGemm = GemmCall | GroupedGemmCall


def gemm_of(call: Call, device: torch.device) -> AnyGemm | None:
    """The GEMM that ``call`` runs on ``device``; None for other ops, empty GEMMs, and without a choice."""
    if call.op not in (MATMUL, GROUPED_MATMUL):
        return None
    given = call.named()
    if not math.prod((*given["a"].shape, *given["b"].shape)):
        return None
    gemm: AnyGemm = (GemmCall if call.op == MATMUL else GroupedGemmCall).of(call, device)
    return gemm if gemm.has_configurations(device) else None


def _as_matrix(layout: Layout) -> Layout:
    """Matrices one below the other, as one."""
    return Layout((math.prod(layout.shape[:-1]), layout.shape[-1]), layout.stride[-2:], layout.offset, layout.dtype)


def _has_tma_layout(layout: Layout) -> bool:
    return launch.has_tma_layout(torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta"))


def _normal_quantized(layout: Layout, spec: QuantSpec, generator: torch.Generator, device: torch.device) -> Quantized:
    x = torch.randn(layout.shape, generator=generator, device=device)
    q = tritonfp8.quantize(x, spec)
    if q.qdata.stride() == layout.stride:
        return q
    return Quantized(layout.zeros(device).copy_(q.qdata), q.scale, spec)
