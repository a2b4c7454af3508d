"""Whole models in the Trainer: its rows train, padding is not counted, and the largest size is found."""

import os

import pytest
import torch
import transformers
import typer
from torch._dynamo.utils import counters
from trainer_cases import act_as_launched
from transformers.integrations import sdpa_attention

from bench.distributed.trainer import reset
from bench.training import client, client_run

RUN = client.Run("tiny", "full", "bf16", batch=2, length=32, steps=6, compiled=False, device="cpu", dtype="float32")
pytestmark = pytest.mark.one_in(3)


@pytest.mark.parametrize(
    ("way", "contender"),
    [
        ("full", "bf16"),
        ("full", "rowwise"),
        ("full", "rowwise with head"),
        ("full", "rowwise stored"),
        ("full", "rowwise stored in backward"),
        ("lora", "rowwise"),
    ],
)
def test_every_trainable_weight_changes(way, contender):
    row = client.train(client.replace(RUN, way=way, contender=contender, padded=True))
    assert row["stuck"] == []
    assert len(set(row["losses"])) == RUN.steps + 1


def test_padding_is_neither_trained_on_nor_counted():
    rows = client_run.Rows(client.replace(RUN, padded=True))
    assert rows.lengths.min() >= 8
    batch = client_run.collated([rows[0], rows[1]], RUN.length)
    assert batch["attention_mask"].sum(1).tolist() == rows.lengths[:2].tolist()
    assert ((batch["labels"] == -100) == (batch["attention_mask"] == 0)).all()
    full = client_run.Rows(RUN)
    assert "attention_mask" not in client_run.collated([full[0], full[1]], RUN.length)


@pytest.mark.parametrize(
    ("predicted", "tried"), [(11, [1, 3, 11, 12]), (14, [1, 3, 14, 13, 12, 11]), (9, [1, 3, 9, 10, 11, 12])]
)
def test_the_largest_size_is_found_from_two_small_ones(predicted, tried, monkeypatch):
    """Also where memory does not grow as it did: 11 layers fit, whatever two of them say."""
    found = []

    def in_process(run):
        found.append(run.layers)
        return {"peak_gib": 2.0 * run.layers} if run.layers <= 11 else None

    monkeypatch.setattr(client, "in_process", in_process)
    assert client.largest(client.replace(RUN, gib=2.0 * predicted))["layers"] == 11
    assert found == tried


def test_a_model_that_does_not_fit_at_all_is_refused(monkeypatch):
    monkeypatch.setattr(client, "in_process", lambda run: None)
    with pytest.raises(RuntimeError, match="not even three layers of Run.*fit"):
        client.largest(client.replace(RUN, gib=1.0))


def test_norms_in_bfloat16_may_round_their_steps_away():
    row = {"dtype": "bfloat16", "contender": "rowwise", "stuck": ["layers.0.norm.weight", "layers.0.up.weight"]}
    assert client._held(row) == ["layers.0.up.weight"]
    assert client._held(row | {"contender": "rowwise stored"}) == row["stuck"]
    assert client._held(row | {"dtype": "float32"}) == row["stuck"]


def test_a_run_that_fails_is_not_out_of_memory():
    with pytest.raises(RuntimeError, match=r"exit status 1(.|\n)*KeyError: 'nonsense'"):
        client.in_process(client.replace(RUN, model="nonsense"))


@pytest.mark.parametrize("regions", [False, True])
def test_blocks_compile_one_by_one_or_together(regions):
    """The blocks are alike: one graph serves all."""
    torch.compiler.reset()
    counters.clear()
    row = client.train(client.replace(RUN, compiled=True, regions=regions, layers=3))
    assert row["stuck"] == []
    assert row["first_step_seconds"] > 0
    assert (counters["stats"]["unique_graphs"] > 1) == regions
    # A later run in this process compiles as it is told.
    assert "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION" not in os.environ


@pytest.mark.parametrize("compiled", [False, True])
def test_causal_attention_gets_no_mask_and_gives_the_losses_of_one(compiled, monkeypatch):
    """Also of padded rows: padding comes behind the text."""
    torch.compiler.reset()
    masked = []
    attention = sdpa_attention.sdpa_attention_forward

    def seen(module, query, key, value, attention_mask, **kwargs):
        masked.append(attention_mask is not None)
        return attention(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", seen)
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", seen)
    losses = {}
    for name in (client.CAUSAL, "sdpa"):
        losses[name] = client.train(client.replace(RUN, padded=True, compiled=compiled, attention=name))["losses"]
        assert set(masked) == {name != client.CAUSAL}
        masked.clear()
    torch.testing.assert_close(losses[client.CAUSAL], losses["sdpa"], rtol=1e-5, atol=0)


def on_ranks(mesh, run):
    act_as_launched()
    row = client.train(run)
    reset()
    return row


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("compiled", [False, True])
def test_fsdp2_shards_the_model_of_several_ranks(ranks, compiled):
    bytes_of = {}
    for contender in ("bf16", "rowwise"):
        run = client.replace(RUN, contender=contender, ranks=4, compiled=compiled, regions=compiled)
        row, *_ = ranks.run(4, on_ranks, run)
        assert row["stuck"] == []
        assert len(row["losses"]) == run.steps + 2
        bytes_of[contender] = row["bytes"]["all_gather"]
    # The embedding, the head and norms are gathered in high precision.
    assert 0.25 < bytes_of["rowwise"] / bytes_of["bf16"] < 0.9


def test_runs_that_differ_have_files_of_their_own():
    plain = {"compiled": True, "regions": False, "ranks": 1, "attention": client.CAUSAL}
    options = [{}, {"compiled": False}, {"regions": True}, {"ranks": 2}, {"attention": "sdpa"}]
    names = [client._name("packed", plain | each) for each in options]
    assert names == ["client-compiled", "client", "client-regions", "client-compiled-x2", "client-compiled-mask"]
    assert client._name("padded", plain) == "client-compiled-padded"


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(typer.BadParameter, match="2 ranks need as many GPUs; this machine has 1"):
        client.main(ranks=2)


def test_what_fsdp2_cannot_train_here_is_refused():
    for options in ({"way": "lora"}, {"padded": True}, {"contender": "rowwise stored"}):
        with pytest.raises(ValueError, match="several ranks need the way 'full', packed rows.*got Run"):
            client.replace(RUN, ranks=2, **options)
