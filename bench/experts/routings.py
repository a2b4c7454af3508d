"""Sizes of models, and how their tokens are spread over experts."""

import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Shape(NamedTuple):
    """A GEMM of groups: tokens of all groups, groups, and N and K of each."""

    tokens: int
    experts: int
    n: int
    k: int


# By model and layer; the rows of all experts of a batch, with the experts that one of several GPUs has.
SHAPES: Mapping[str, Shape] = {
    "DeepSeek-V3 gate + up": Shape(32768, 32, 4096, 7168),
    "DeepSeek-V3 down": Shape(32768, 32, 7168, 2048),
    "Qwen3-30B-A3B gate + up": Shape(131072, 128, 1536, 2048),
    "Qwen3-30B-A3B down": Shape(131072, 128, 2048, 768),
    "Mixtral-8x7B up": Shape(32768, 8, 14336, 4096),
    "gpt-oss gate + up": Shape(16384, 32, 5760, 2880),
    "Qwen3-30B-A3B decode": Shape(512, 128, 1536, 2048),
}
# What torch's kernels require of each group.
MULTIPLE = 16


def uniform(tokens: int, experts: int) -> list[int]:
    """As many tokens for each."""
    return [tokens // experts] * experts


def zipf(tokens: int, experts: int) -> list[int]:
    """The n-th most frequent expert gets a share of 1 / n; in an order of its own, always the same."""
    shares = [1 / (n + 1) for n in range(experts)]
    sizes = [int(tokens * share / sum(shares)) // MULTIPLE * MULTIPLE for share in shares]
    sizes[0] += tokens - sum(sizes)
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(1)).tolist()
    return [sizes[i] for i in order]


def zipf_with_an_empty_expert(tokens: int, experts: int) -> list[int]:
    """Zipf over all experts but the first, which gets no token."""
    return [0, *zipf(tokens, experts - 1)]


def one_expert(tokens: int, experts: int) -> list[int]:
    """All tokens at one expert in the middle."""
    return [tokens if i == experts // 2 else 0 for i in range(experts)]


DISTRIBUTIONS: Mapping[str, Callable[[int, int], list[int]]] = {
    "uniform": uniform,
    "zipf": zipf,
    "zipf, one empty": zipf_with_an_empty_expert,
    "one expert": one_expert,
}


def offsets_of(distribution: str, shape: Shape, device: str) -> Tensor:
    """The end of each group."""
    sizes = torch.tensor(DISTRIBUTIONS[distribution](shape.tokens, shape.experts))
    return sizes.cumsum(0).to(torch.int32).to(device)


def interleaved_seconds(calls: Mapping[str, Callable[[], object]], rounds: int, repeats: int) -> dict[str, float]:
    """The median time of each call on the GPU. They take turns, so that the clock of a warm GPU slows all alike."""
    for call in calls.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) / 1e3 / repeats)
    return {name: statistics.median(each) for name, each in times.items()}
