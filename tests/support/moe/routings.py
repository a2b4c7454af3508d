"""Sizes of groups of tokens."""

import pytest
import torch

ROUTINGS = {
    "first empty": (0, 7, 130, 1),
    "middle empty": (127, 0, 0, 129),
    "last empty": (20, 33, 0),
    "all empty": (0, 0, 0),
    "one with all": (0, 300, 0),
    "even": (64, 64, 64),
    "one group": (70,),
}


def ends(sizes):
    """The offsets of groups of these sizes."""
    return torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def routing_cases():
    """Numbers of tokens with sizes of groups; some tokens belong to none."""
    return [
        pytest.param(sum(sizes) + rest, sizes, id=f"{name}{', rest' if rest else ''}")
        for name, sizes in ROUTINGS.items()
        for rest in ((0, 140) if name in ("first empty", "all empty") else (0,))
        if sum(sizes) + rest
    ]
