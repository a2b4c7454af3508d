"""The model of the tests of ``bench.distributed``, and the functions of each rank."""

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from bench.distributed import models
from bench.distributed import run as distributed
from bench.distributed.compare import Settings, compare
from bench.distributed.models import Contestant
from bench.distributed.ranks import Ranks

BROKEN = "broken on all ranks"
HIDDEN, FFN, LAYERS, VOCABULARY = 64, 1536, 2, 256
CONFIG = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def _fail(model):
    raise ZeroDivisionError("nothing to convert")


def run(folder, rank, size, **settings):
    """A whole run without torchao and with one contestant that fails. Rank 0 writes the JSON."""
    ranks = Ranks(rank, size, dist.FileStore(f"{folder}/store", size), patience=60, grace=5)
    settings = Settings(**settings)

    def note(order, rows):
        if rank == 0:
            distributed.write(Path(folder) / distributed.FILE, settings, "cpu", order, rows)

    with (
        mock.patch.object(models, "has_torchao", return_value=False),
        mock.patch.object(Settings, "contestants", return_value=[*settings.contestants(), Contestant(BROKEN, _fail)]),
    ):
        _, rows = compare(settings, ranks, torch.device("cpu"), note)
    return rows


def run_on_mesh(mesh, folder, **settings):
    """:func:`run` on the ranks of a mesh."""
    return run(folder, dist.get_rank(), mesh.size(), **settings)
