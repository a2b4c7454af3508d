"""The scaling model: what must hold of any network, and errors of arguments."""

import math

import pytest
from typer.testing import CliRunner

from bench.scale import compute, run, traffic
from bench.scale.network import Group, Network
from bench.scale.sources import CONSTANTS, RING
from bench.scale.step import EXPOSED, MODELS, Layout, predict
from bench.scale.traffic import FSDP, TP, Block

LINK = CONSTANTS["NVLink, one direction"].value
FREE = Network(nvlink=math.inf, nic=math.inf, latency=0)
SIZE = 1 << 28


def step(recipe="rowwise", network=None, name="llama3-8b", tokens=8192, **layout):
    return predict(name, recipe, Layout(**layout), 1, tokens, network or Network())


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("latency", [0, 1])
def test_more_ranks_never_make_a_collective_of_as_many_bytes_faster(kind, latency):
    network = Network(latency=latency)
    times = [network.seconds(kind, SIZE, Group.strided(ranks, 1, 8)) for ranks in (1, 2, 4, 8, 16, 64, 512, 2048)]
    assert times[0] == 0 < times[1]
    assert times == sorted(times)


def test_bandwidth_of_a_large_gather_and_latency_of_a_small_one():
    gather = Network(latency=0).seconds("all_gather", SIZE, Group(8, 8))
    assert gather == pytest.approx(SIZE * 7 / 8 / LINK)
    assert Network(latency=0).seconds("all_reduce", SIZE, Group(8, 8)) == pytest.approx(2 * gather)
    small = Network().seconds("all_gather", 8, Group(8, 8))
    assert small == pytest.approx(RING["LL"].base + 7 * RING["LL"].nvlink, rel=1e-3)


def test_ranks_of_a_machine_share_its_adapters():
    network = Network(latency=0)
    whole, single = (network.seconds("all_gather", SIZE, Group(64, a_machine)) for a_machine in (8, 1))
    assert network.bus(Group(64, 8)) == pytest.approx(LINK)
    assert network.bus(Group(64, 1)) == 50e9
    assert single == pytest.approx(SIZE * 63 / 64 / 50e9)
    assert whole == pytest.approx(SIZE * 63 / 64 / LINK)
    assert Group.strided(16, 8, 8) == Group(16, 1)
    assert Group.strided(16, 1, 8) == Group(16, 8)


@pytest.mark.parametrize(
    ("name", "recipe", "layout"),
    [
        ("llama3-8b", "bf16", {"gpus": 2048}),
        ("llama3-8b", "tensorwise", {"gpus": 64, "shard": 8, "gather": True, "amax": "layer"}),
        ("llama3-70b", "rowwise", {"gpus": 256, "tp": 8, "gather": True}),
        ("qwen3-30b-a3b", "blockwise", {"gpus": 64, "ep": 8, "gather": True}),
    ],
)
def test_without_latency_and_with_infinite_bandwidth_a_step_computes(name, recipe, layout):
    free = step(recipe, FREE, name, **layout)
    assert all(free["parts"][part] == 0 for part in EXPOSED)
    assert free["seconds"] == pytest.approx(sum(free["parts"][part] for part in ("compute", "copies", "optimizer")))
    real = step(recipe, None, name, **layout)
    assert real["seconds"] > free["seconds"]
    assert real["parts"]["compute"] == free["parts"]["compute"]


@pytest.mark.parametrize("recipe", traffic.RECIPES)
def test_the_8_bit_gather_halves_the_bytes_of_weights(recipe):
    block = MODELS["llama3-8b"].block(1)
    codes, plain = (traffic.of_block(block, FSDP, each).bytes for each in (recipe, "bf16"))
    # Norms stay in bf16, in two gathers.
    norms = 2 * 2 * 2 * block.hidden
    assert round(codes["all_gather"]) - norms == (round(plain["all_gather"]) - norms) / 2
    assert round(codes["reduce_scatter"]) == round(plain["reduce_scatter"])


@pytest.mark.parametrize("way", [FSDP, TP])
def test_bytes_of_other_sizes_are_those_that_are_counted(way):
    block = Block(384 if way == FSDP else 512, 1024, 256, 256, 768)
    rows = [row for row in traffic.count([block], ["tensorwise"]) if row["way"] == way]
    assert [row["recipe"] for row in rows] == ["bf16", "tensorwise"]
    for row in rows:
        found = traffic.of_block(block, way, row["recipe"])
        assert {kind: round(size) for kind, size in found.bytes.items()} == row["bytes"]
        assert found.calls == row["calls"]


def test_what_helps_where_gathers_are_exposed():
    few = {"gpus": 2048, "tokens": 2048}
    bare = step(**few)
    assert bare["parts"]["exposed reductions"] > 0
    speeds = [
        found["tokens_a_second_a_gpu"]
        for found in (bare, step(gather=True, **few), step(gather=True, reshard=False, **few))
    ]
    assert speeds == sorted(speeds)
    shared = step(gather=True, shard=64, **few)
    assert shared["tokens_a_second_a_gpu"] > speeds[1]
    assert shared["state_bytes"] > step(gather=True, **few)["state_bytes"]


def test_one_reduction_of_amaxes_a_model_is_faster_than_one_a_layer():
    amaxes = [step("tensorwise", gpus=512, gather=True, amax=amax)["parts"]["amaxes"] for amax in ("model", "layer")]
    assert 0 < 20 * amaxes[0] < amaxes[1]
    assert step("tensorwise", gpus=512)["parts"]["amaxes"] == 0


def test_recomputed_forwards_take_time():
    block, times = MODELS["llama3-8b"].block(8192), []
    for recompute in compute.RECOMPUTED:
        times.append(compute.block_seconds(block, "rowwise", 8192, 128, recompute=recompute))
    none, selective, full = times
    assert none.forward == selective.forward == full.forward
    assert none.backward < selective.backward < full.backward
    assert full.backward == pytest.approx(none.backward + none.forward)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model llama3-9b", "model must be one of 'llama3-8b'"),
        ("--model llama3-8b --recipe fp8", "recipe must be one of 'bf16'"),
        ("--model llama3-8b --recipe bf16 --gather", "bf16 has no 8-bit gather"),
        ("--model llama3-8b --gpus 12 --tp 8", "gpus must be a multiple of tp, 8; got 12"),
        ("--model llama3-8b --gpus 48 --tp 3", "tp must divide the 8 heads of keys"),
        ("--model llama3-8b --gpus 64 --shard 48", "shard must divide the 64 data-parallel ranks; got 48"),
        ("--model llama3-8b --gpus 64 --ep 4", "ep must divide the experts of a mixture, 0; got 4"),
        ("--model qwen3-30b-a3b --gpus 8 --ep 4 --recipe tensorwise", "measure it with torchrun"),
        ("--model qwen3-30b-a3b --gpus 8 --tp 2", "experts are sharded by ep here; got tp=2"),
        ("--model llama3-8b --gpus 8,x", "gpus must be numbers separated by commas"),
        ("--model llama3-8b --batch 0", "batch must be at least 1; got 0"),
        ("--model llama3-8b --nic 0", "nic must be positive; got 0"),
        ("--model llama3-8b --latency -1", "latency is a factor of at least 0; got -1"),
        ("--runs nine", "runs must be one of 'scaling', 'eight'"),
        ("", "give --model, --runs, --check or --count"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    done = CliRunner().invoke(run.app, arguments.split())
    assert done.exit_code == 2
    # The box of the message breaks lines.
    assert message.replace(" ", "") in "".join(done.output.replace("│", "").split())
