"""Ranks that warm up together: a single one, and two machines."""

import json
import os
import subprocess
import sys

import pytest
import torch
import warmup_jobs
from tuned import CPU_MACHINE, entry, layer_products, stored
from warmup_jobs import SHAPES

from tritonfp8.tuning import store
from tritonfp8.warmup.ranks import Ranks

CPU = torch.device("cpu")


pytestmark = [pytest.mark.usefixtures("home"), pytest.mark.one_in(2)]


class TestRanks:
    def test_one_alone(self):
        ranks = Ranks()
        assert ranks.exchange(b"x") == [b"x"]
        assert ranks.together(lambda: 3) == 3
        assert ranks.together(None) is None
        with pytest.raises(ZeroDivisionError):
            ranks.together(lambda: 1 / 0)

    def test_two_machines_choose_alike_and_share_their_errors(self, home, monkeypatch):
        """torchrun, two ranks with homes of their own: rank 0 tunes, then fails, then is gone."""
        _, found = layer_products(*SHAPES)
        other = found[0].key._replace(n=999)
        for rank in (0, 1):
            monkeypatch.setenv("XDG_CACHE_HOME", str(home / str(rank)))
            own = {other._replace(k=100 + rank): entry(found[0].candidates(CPU)[1].name)}
            store.save({**own, found[0].key: entry(found[0].candidates(CPU)[0].name, triton="0")}, CPU_MACHINE)
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        ended = subprocess.run(
            [*run, warmup_jobs.__file__, "rank_of_two_machines", str(home)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        seen = [json.loads(path.read_text()) for path in (home / "0/seen.json", home / "1/seen.json") if path.exists()]
        assert len(seen) == 2, ended.stderr[-3000:]
        expected = {str(product): product.candidates(CPU)[-1].name for product in found}
        for rank, each in enumerate(seen):
            assert each["choices"] == expected
            assert each["report"]["failed"] == []
            assert each["report"]["tuned"] == (0 if rank else len(found))
            assert each["report"]["compiled"] > len(found)
        # Rank 1 has an argument that it cannot take: both end at once.
        messages = ["dtype must be one of", "recipes must be a sequence", "timeout must be a number", "workers must be"]
        kinds = ["ValueError", "TypeError", "ValueError", "ValueError"]
        for kind, message, here, there in zip(kinds, messages, seen[1]["bad"], seen[0]["bad"], strict=True):
            assert here.startswith(f"{kind}: {message}")
            assert there.startswith(f"RuntimeError: the warm-up failed on rank 1: {kind}: {message}")
        assert max(each["waited"] for each in seen) < 30
        assert seen[0]["errors"] == ["out of luck"]
        assert seen[1]["errors"][0] == "the warm-up failed on rank 0: RuntimeError: out of luck"
        assert "the other ranks of the warm-up did not answer" in seen[1]["errors"][1]
        stores = []
        for rank in (0, 1):
            monkeypatch.setenv("XDG_CACHE_HOME", str(home / str(rank)))
            stores.append(stored())
        assert stores[0] == stores[1]
        assert len(stores[0]) == len(found) + 2
