"""Collectives of gloo on this machine: seconds by size, and bytes of a block on ranks that exist."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bench.scale import traffic
from bench.scale.traffic import Block

RANKS = 4
# Megabytes of the larger side. Latency and bandwidth are of the first and the last.
SIZES = (2, 4, 8, 16)
REPEATS = 60
# Four processes share two cores with other programs, whose load changes the time of a size from run to run.
BAND = (0.8, 1.25)
KINDS = ("all_gather", "all_reduce")
# Every rank has a multiple of 128 of each size.
BLOCK = Block(512, 1024, 512, 512, 512)


def _call(kind: str, size: int) -> Any:
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // RANKS)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part)
    return lambda: dist.all_reduce(whole)


def _once(call: Callable[[], Any]) -> float:
    dist.barrier()
    began = time.perf_counter()
    call()
    # The slowest rank counts.
    taken = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def _seconds(kind: str) -> list[dict[str, Any]]:
    """Rows of the sizes, in turns. Other programs of this machine only add time, so that the shortest call counts."""
    calls = {size: _call(kind, size << 20) for size in SIZES}
    times = [{size: _once(call) for size, call in calls.items()} for _ in range(REPEATS)]
    return [{"kind": kind, "size": size << 20, "seconds": min(each[size] for each in times)} for size in SIZES]


def _rank(rank: int, folder: str, recipes: Sequence[str]) -> None:
    os.environ |= {"OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    seconds = [row for kind in KINDS for row in _seconds(kind)]
    blocks = traffic.differences((BLOCK,), recipes, RANKS)
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps({"seconds": seconds, "blocks": blocks}))
    dist.barrier()
    dist.destroy_process_group()


def measured(recipes: Sequence[str] = traffic.RECIPES) -> dict[str, list[dict[str, Any]]]:
    """Rows of seconds by kind and size, and of bytes of a block by way and recipe, on four ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (folder, tuple(recipes)), RANKS)
        found: dict[str, list[dict[str, Any]]] = json.loads((Path(folder) / "rows.json").read_text())
    return found


def fitted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the sizes between the smallest and the largest, with the seconds that these two predict."""
    found = []
    for kind in KINDS:
        first, *others, last = (row for row in rows if row["kind"] == kind)
        beta = (last["seconds"] - first["seconds"]) / (last["size"] - first["size"])
        alpha = first["seconds"] - beta * first["size"]
        found += [row | {"predicted": alpha + beta * row["size"]} for row in others]
    return found


def same_bytes(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of gathered and scattered bytes of the ranks, with the bytes that small models on two ranks predict."""
    found = []
    for row in rows:
        predicted = traffic.of_block(Block(**row["block"]), row["way"], row["recipe"]).bytes
        for kind in ("all_gather", "reduce_scatter"):
            found.append({**row, "kind": kind, "bytes": row["bytes"][kind], "predicted": round(predicted[kind])})
    return found
