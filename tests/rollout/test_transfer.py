"""Weights from the ranks of a trainer to the ranks of an engine over a process group: their bytes, and errors."""

import os
import signal
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engines import FORMATS, bytes_of, engine_of, trainer_of
from process_group import RankError, made_mesh
from raised import raised
from torch.distributed.fsdp import fully_shard

import tritonfp8
from tritonfp8.export import TensorStream
from tritonfp8.rollout import Receiver, receiver, send

pytestmark = pytest.mark.xdist_group("ranks")
FORMAT = "fine_grained"


def stream(kind="llama", format=FORMAT, seed=0, model=None):
    return tritonfp8.export.tensors(trainer_of(kind, format, seed) if model is None else model, format)


def same(engine, expected):
    return all(torch.equal(bytes_of(x), bytes_of(expected[name])) for name, x in engine.items())


class Counted:
    """Messages that this rank sends, by rank."""

    def __enter__(self):
        self.sizes, real = {}, dist.isend

        def isend(x, dst, **options):
            self.sizes.setdefault(dst, []).append(x.nbytes)
            return real(x, dst, **options)

        self._patch = mock.patch.object(dist, "isend", isend)
        self._patch.start()
        return self

    def __exit__(self, *error):
        self._patch.stop()


def refresh(mesh, kind, format, trainers, bucket_bytes, experts=1, sharded=False):
    """Two refreshes of an engine on the ranks after the trainers. Returns what was sent to each, or received."""
    rank, group, size = mesh.get_rank(), mesh.get_group(), mesh.size() - trainers
    halves = made_mesh("cpu", (2, 2), ("side", "rank")) if sharded else None
    at, found, device = rank - trainers, [], mesh.device_type
    if at >= 0:
        engine, expected = (engine_of(kind, format, size, at, experts) for _ in range(2))
        engine = {name: x.to(device) for name, x in engine.items()}
        mine = Receiver(engine, format, rank=at, size=size)
        places = {name: x.data_ptr() for name, x in engine.items()}
    for seed in (0, 1):
        if at < 0:
            model = trainer_of.__wrapped__(kind, format, seed).to(device)
            if sharded:
                fully_shard(model.model.layers[0], mesh=halves["rank"])
                fully_shard(model, mesh=halves["rank"])
            with Counted() as counted:
                total = send(stream(kind, format, model=model), group, bucket_bytes=bucket_bytes)
            assert total == sum(map(sum, counted.sizes.values()))
            found.append(counted.sizes)
        else:
            found.append(mine.receive(group))
            Receiver(expected, format, rank=at, size=size).load(stream(kind, format, seed))
            assert same({name: x.cpu() for name, x in engine.items()}, expected)
    assert at < 0 or places == {name: x.data_ptr() for name, x in engine.items()}
    return found


def test_two_ranks_of_an_engine(ranks):
    """In buckets that are smaller than a tensor, and no multiple of one."""
    sent, *received = ranks.run(3, refresh, "llama", "compressed_channel", 1, 5000)
    for sizes, *arrived in zip(sent, *received, strict=True):
        assert sizes.keys() == {1, 2}
        for rank, total in zip((1, 2), arrived, strict=True):
            assert {*sizes[rank][:-1]} == {5008}
            # Parts begin at multiples of 16 bytes.
            assert total <= sum(sizes[rank]) < total + 16 * 40


@pytest.mark.multigpu
@pytest.mark.parametrize(("kind", "format"), [("llama", "compressed_channel"), ("moe", FORMAT)])
def test_two_gpus(gpus, kind, format):
    """By NCCL, from the GPU that trains to the GPU that generates."""
    sent, received = gpus.run(2, refresh, kind, format, 1, 5000)
    assert [each.keys() for each in sent] == [{1}] * 2
    assert all(0 < total <= sum(each[1]) for each, total in zip(sent, received, strict=True))


def test_sharded_trainers(ranks):
    """Two ranks of FSDP2 gather each weight, and one sends; engines share the experts."""
    sent, beside, *received = ranks.run(4, refresh, "moe", FORMAT, 2, 2**20, experts=2, sharded=True)
    assert beside == [{}, {}]
    assert [sizes.keys() for sizes in sent] == [{2, 3}] * 2
    assert all(total > 0 for arrived in received for total in arrived)


def odd(mesh):
    """Tensors of odd sizes, one of a number and one of nothing, in the smallest buckets."""
    found = {
        "x.weight": torch.arange(15, dtype=torch.uint8).view(torch.float8_e4m3fn).view(3, 5),
        "x.weight_scale": torch.tensor([[1.0], [2.0], [3.0]]),
        "count": torch.tensor(7),
        "nothing": torch.empty(0, 3),
        "bias": torch.arange(7).bfloat16(),
        "norm": torch.arange(3).float(),
    }
    if mesh.get_rank() == 0:
        # Parts begin at multiples of 16.
        assert send(found, mesh.get_group(), bucket_bytes=1) == 5 * 16
        return True
    engine = {name: torch.zeros_like(x) for name, x in found.items()}
    assert Receiver(engine, "compressed_channel").receive(mesh.get_group()) == 15 + 12 + 8 + 14 + 12
    return same(engine, found)


def test_odd_sizes(ranks):
    assert ranks.run(2, odd) == [True, True]


SHARES = {
    FORMAT: 1 / 2 + 1 / 8192, "compressed_channel": 1 / 2 + 1 / 256, "compressed_mxfp8": 1 / 2 + 1 / 64,
    "compressed_mxfp4": 1 / 4 + 1 / 64,
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_of_each_rank(ranks, format):
    """Codes are half the bytes of bf16, or a quarter, and scales add one of float32 a block of 128x128, or a row of
    512, or a byte a block of 32. Each rank is sent its half of them, and its rows of the vocabulary."""
    sent, *_ = ranks.run(3, refresh, "llama", format, 1, 2**26)
    weights = [x for name, x in trainer_of("llama", format).named_parameters() if name.endswith("_proj.weight")]
    quantized = sum(x.nbytes for x in weights) * SHARES[format] / 2
    if format == "compressed_channel":
        # The scales of the rows of two layers whose columns are shared.
        quantized += 2 * 512 * 4 / 2
    norms_and_biases = (3 * 512 + 512 + (512 + 256 + 256) / 2) * 2
    for rank, rows in ((1, 64), (2, 26)):
        assert sum(sent[0][rank]) == quantized + norms_and_biases + 2 * rows * 512 * 2


def disagree(mesh, mistake):
    """A refresh that fails at one rank, and one that works. Returns the error, and whether data was sent."""
    rank, group = mesh.get_rank(), mesh.get_group()
    found = dict(stream())
    if mistake == "a scale":
        # Of the rows of rank 1 of the engine.
        found["model.layers.0.self_attn.q_proj.weight_scale_inv"][-1] = -1
    if mistake == "no stream":
        found = [("x", 1)]
    if mistake == "broken":
        found = TensorStream(TensorStream.of(found).headers, list(found.items())[:-3])
    if rank == 0:
        with Counted() as counted:
            error = raised(lambda: send(found, group))
        send(stream(), group)
        return error, bool(counted.sizes)
    engine = engine_of("llama", FORMAT, 2, rank - 1)
    before = {name: x.clone() for name, x in engine.items()}
    if rank == 2 and mistake == "names":
        engine["model.norm.bias"] = torch.ones(512)
    error = raised(lambda: Receiver(engine, FORMAT, rank=rank - 1, size=2).receive(group))
    assert same(before, engine)
    engine.pop("model.norm.bias", None)
    Receiver(engine, FORMAT, rank=rank - 1, size=2).receive(group)
    assert not same(before, engine)
    return error, None


MISTAKES = {
    "names": (2, "ValueError", "does not have these tensors of the engine: model.norm.bias", False),
    "a scale": (2, "ValueError", "q_proj.weight_scale_inv must be finite and not negative", True),
    "no stream": (0, "TypeError", "the tensor 'x' must be a tensor", False),
    "broken": (0, "ValueError", "the stream must go on with", True),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_of_one_rank_is_an_error_of_all_and_changes_none(ranks, mistake):
    where, kind, message, is_sent = MISTAKES[mistake]
    found = ranks.run(3, disagree, mistake)
    assert found[0][1] is is_sent
    for rank, (text, _) in enumerate(found):
        told = (
            "" if rank == where else f"RuntimeError: weights were not sent, and no engine has changed: rank {where}: "
        )
        assert text.startswith(f"{told}{kind}: ")
        assert message in text


def colocated(mesh):
    """Ranks that train and generate: each loads its part, all or none. Returns the errors of two wrong streams."""
    rank, group = mesh.get_rank(), mesh.get_group()
    model = trainer_of.__wrapped__("llama", FORMAT)
    fully_shard(model, mesh=mesh)
    engine, expected = (engine_of("llama", FORMAT, 2, rank) for _ in range(2))
    before, wrong = {name: x.clone() for name, x in engine.items()}, dict(stream())
    # Of the rows of rank 1.
    wrong["model.layers.0.self_attn.q_proj.weight_scale_inv"][-1] = -1
    mine = Receiver(engine, FORMAT, rank=rank, size=2)
    other = Receiver(engine | ({"x": torch.ones(1)} if rank == 1 else {}), FORMAT, rank=rank, size=2)
    errors = [
        raised(lambda: other.load(stream(model=model), group=group)),
        raised(lambda: mine.load(wrong, group=group)),
    ]
    assert same(before, engine)
    mine.load(stream(model=model), group=group)
    Receiver(expected, FORMAT, rank=rank, size=2).load(stream())
    assert same(engine, expected)
    return errors


def test_ranks_that_train_and_generate(ranks):
    told, own = ranks.run(2, colocated)
    for text, error, message in zip(
        told, own, ("tensors of the engine: x", "must be finite and not negative"), strict=True
    ):
        assert text == f"RuntimeError: weights were not sent, and no engine has changed: rank 1: {error}"
        assert error.startswith("ValueError: ")
        assert message in error


def interrupted(mesh):
    """Ctrl-C on one rank of the engine after all agreed, before it writes. Whether all have the new weights."""
    rank, group = mesh.get_rank(), mesh.get_group()
    if rank == 0:
        send(stream(), group)
        return True
    engine, expected = (engine_of("llama", FORMAT, 2, rank - 1) for _ in range(2))
    Receiver(expected, FORMAT, rank=rank - 1, size=2).load(stream())
    mine, real = Receiver(engine, FORMAT, rank=rank - 1, size=2), receiver.settle

    def settle(group, error, *args):
        found = real(group, error, *args)
        # Only the first step hands something in.
        if not args and rank == 1:
            signal.raise_signal(signal.SIGINT)
        return found

    before, is_raised = signal.signal(signal.SIGINT, signal.default_int_handler), False
    try:
        with mock.patch.object(receiver, "settle", settle):
            mine.receive(group)
    except KeyboardInterrupt:
        is_raised = True
    finally:
        signal.signal(signal.SIGINT, before)
    return same(engine, expected) and is_raised == (rank == 1)


def test_ctrl_c_after_all_ranks_agreed_leaves_the_new_weights(ranks):
    assert ranks.run(3, interrupted) == [True] * 3


def left_alone(mesh, folder):
    """The trainer ends while it sends. What a rank of the engine has then is in a file: the processes end, too."""
    rank, group = mesh.get_rank(), mesh.get_group()
    if rank == 0:
        found = dict(stream())

        def breaking():
            for at, entry in enumerate(found.items()):
                if at == len(found) - 3:
                    os._exit(1)
                yield entry

        send(TensorStream(TensorStream.of(found).headers, breaking()), group, bucket_bytes=2**16)
    engine = engine_of("llama", FORMAT, 2, rank - 1)
    before = {name: x.clone() for name, x in engine.items()}
    error = raised(lambda: Receiver(engine, FORMAT, rank=rank - 1, size=2).receive(group))
    Path(folder, str(rank)).write_text(f"{same(before, engine)}, {error}")


def test_a_trainer_that_ends_leaves_the_old_weights(ranks, tmp_path):
    with pytest.raises(RankError, match="rank 0: the process ended"):
        ranks.run(3, left_alone, tmp_path, after_error=30)
    for rank in (1, 2):
        assert (tmp_path / str(rank)).read_text().startswith("True, RuntimeError: ")
