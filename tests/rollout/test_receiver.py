"""New weights in tensors with the names and shapes of vLLM: the bits of the stream, in every shard."""

import weakref

import pytest
import torch
import torch.multiprocessing
from cases import rounded
from checkpoints import MIXTRAL, model_of
from engines import FORMATS, bytes_of, engine_of, trainer_of, unfused
from hypothesis import given
from hypothesis import strategies as st

import tritonfp8
from tritonfp8 import reference
from tritonfp8.export import TensorStream
from tritonfp8.rollout import EngineName, Receiver
from tritonfp8.specs import MXFP4

CASES = [
    *((kind, format, ranks) for kind in ("llama", "moe") for format in FORMATS for ranks in (1, 2, 4)),
    ("qwen3", "fine_grained", 2),
    *(("deepseek", "compressed_channel", ranks) for ranks in (1, 2)),
]


def check_bits(found, model, format):
    expected = dict(tritonfp8.export.tensors(model, format))
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.shape == expected[name].shape, name
        # What an engine has in float32 is the same value.
        assert torch.equal(bytes_of(x.to(expected[name].dtype)), bytes_of(expected[name])), name


@pytest.mark.parametrize(("kind", "format", "ranks"), CASES)
def test_each_rank_gets_its_shard_twice_in_a_row(kind, format, ranks):
    engines = [engine_of(kind, format, ranks, rank) for rank in range(ranks)]
    receivers = [Receiver(each, format, rank=rank, size=ranks) for rank, each in enumerate(engines)]
    places = [{name: x.data_ptr() for name, x in each.items()} for each in engines]
    for seed in (0, 1):
        model = trainer_of(kind, format, seed)
        for receiver in receivers:
            receiver.load(tritonfp8.export.tensors(model, format))
        check_bits(unfused(engines, kind, format), model, format)
    assert places == [{name: x.data_ptr() for name, x in each.items()} for each in engines]


@pytest.mark.parametrize("format", FORMATS)
def test_experts_of_a_rank(format):
    model = trainer_of("moe", format)
    engines = [engine_of("moe", format, 2, rank, expert_ranks=2) for rank in range(2)]
    for rank, engine in enumerate(engines):
        Receiver(engine, format, rank=rank, size=2).load(tritonfp8.export.tensors(model, format))
    check_bits(unfused(engines, "moe", format, expert_ranks=2), model, format)


def test_experts_by_their_numbers_and_an_expert_that_a_rank_has_twice():
    found = dict(tritonfp8.export.tensors(trainer_of("moe", "fine_grained"), "fine_grained"))
    engine = engine_of("moe", "fine_grained", 2, expert_ranks=2)
    Receiver(engine, "fine_grained", size=2, experts=(3, 3)).load(found)
    name = "model.layers.0.mlp.experts"
    for at in range(2):
        gate, up = engine[f"{name}.w13_weight"][at].chunk(2)
        assert torch.equal(bytes_of(gate), bytes_of(found[f"{name}.3.gate_proj.weight"]))
        assert torch.equal(bytes_of(up), bytes_of(found[f"{name}.3.up_proj.weight"]))
        assert torch.equal(engine[f"{name}.w2_weight_scale_inv"][at], found[f"{name}.3.down_proj.weight_scale_inv"])
    for experts in ((0, 4), (0,)):
        with pytest.raises(ValueError, match=r"w13_weight of the engine has shape \(2, 1024, 512\)"):
            Receiver(engine, "fine_grained", size=2, experts=experts).load(found)


@pytest.mark.parametrize(("old", "new"), [(".w13_", ".routed_experts.w13_"), ("qkv_proj", "Wqkv")])
def test_names_of_other_engines(old, new):
    """Of newer versions of vLLM; and of an engine that a row of the table describes."""
    engine = engine_of("moe", "fine_grained")
    renamed = {name.replace(old, new): x for name, x in engine.items()}
    assert renamed.keys() != engine.keys()
    row = EngineName(".Wqkv.", (".q_proj.", ".k_proj.", ".v_proj."), repeated=True)
    model = trainer_of("moe", "fine_grained")
    Receiver(renamed, "fine_grained", names=[row]).load(tritonfp8.export.tensors(model, "fine_grained"))
    check_bits(unfused([engine], "moe", "fine_grained"), model, "fine_grained")


def test_rows_are_shared_where_the_table_says_how():
    """Part of a tensor that a checkpoint has joined, such as Phi-3's, would be rows of others."""
    whole = torch.arange(24.0).view(12, 2)
    for name in ("x.qkv_proj.weight", "x.in_proj.weight"):
        engine = {name: torch.zeros(6, 2)}
        with pytest.raises(
            ValueError, match=rf"{name} of the engine has shape \(6, 2\).*where a row of names says how"
        ):
            Receiver(engine, "compressed_channel", rank=1, size=2).load({name: whole})
        Receiver({name: (all_rows := torch.zeros(12, 2))}, "compressed_channel", rank=1, size=2).load({name: whole})
        assert torch.equal(all_rows, whole)
    row = EngineName(".in_proj.", (".in_proj.",))
    Receiver(engine, "compressed_channel", rank=1, size=2, names=[row]).load({name: whole})
    assert torch.equal(engine[name], whole[6:])


def test_a_vocabulary_with_padding_that_every_rank_has():
    whole = torch.arange(180.0).view(90, 2)
    engine = {"lm_head.weight": torch.full((128, 2), -1.0)}
    Receiver(engine, "compressed_channel", rank=1, size=2).load({"lm_head.weight": whole})
    assert torch.equal(engine["lm_head.weight"], torch.cat([whole, torch.full((38, 2), -1.0)]))
    for rows in (154, 40):
        engine = {"lm_head.weight": torch.zeros(rows, 2)}
        with pytest.raises(ValueError, match="neither all of lm_head.weight"):
            Receiver(engine, "compressed_channel", rank=1, size=2).load({"lm_head.weight": whole})


def test_experts_of_mixtral():
    model = model_of("mixtral", MIXTRAL)
    tritonfp8.convert(model, "rowwise")
    found = dict(tritonfp8.export.tensors(model, "compressed_channel"))
    name = "model.layers.0.block_sparse_moe.experts"
    engine = {
        f"{name}.w13_weight": torch.zeros(4, 256, 256).to(torch.float8_e4m3fn),
        f"{name}.w13_weight_scale": torch.zeros(4, 256, 1),
        f"{name}.w2_weight": torch.zeros(4, 256, 128).to(torch.float8_e4m3fn),
        f"{name}.w2_weight_scale": torch.zeros(4, 256, 1),
    }
    experts = {key: x for key, x in found.items() if name in key}
    Receiver(engine, "compressed_channel").load(experts)
    for expert in range(4):
        w1, w3 = engine[f"{name}.w13_weight"][expert].chunk(2)
        assert torch.equal(bytes_of(w1), bytes_of(found[f"{name}.{expert}.w1.weight"]))
        assert torch.equal(bytes_of(w3), bytes_of(found[f"{name}.{expert}.w3.weight"]))
        assert torch.equal(engine[f"{name}.w2_weight_scale"][expert], found[f"{name}.{expert}.w2.weight_scale"])


def test_an_engine_that_transposed_a_weight_and_a_scale_in_e8m0():
    format, name = "compressed_mxfp8", "model.layers.0.mlp.down_proj.weight"
    found, engine = dict(tritonfp8.export.tensors(trainer_of("llama", format), format)), engine_of("llama", format)
    transposed = engine[name].t().contiguous()
    engine |= {name: transposed.t(), f"{name}_scale": engine[f"{name}_scale"].view(torch.float8_e8m0fnu)}
    Receiver(engine, format).load(found)
    assert torch.equal(bytes_of(transposed), bytes_of(found[name].t()))
    assert torch.equal(bytes_of(engine[f"{name}_scale"]), bytes_of(found[f"{name}_scale"]))


def test_two_codes_a_byte_have_the_values_that_training_read():
    format, name = "compressed_mxfp4", "model.layers.0.self_attn.qkv_proj.weight"
    model, engines = trainer_of("llama", format), [engine_of("llama", format, 2, rank) for rank in range(2)]
    for rank, engine in enumerate(engines):
        Receiver(engine, format, rank=rank, size=2).load(tritonfp8.export.tensors(model, format))
    layer = model.model.layers[0].self_attn
    for rank, engine in enumerate(engines):
        found = reference.dequantize(
            engine[f"{name}_packed"], engine[f"{name}_scale"].view(torch.float8_e8m0fnu), *MXFP4.args, torch.bfloat16
        )
        parts = [rounded(each.weight.detach(), each.recipe) for each in (layer.q_proj, layer.k_proj, layer.v_proj)]
        assert torch.equal(found, torch.cat([part.chunk(2)[rank] for part in parts]))
    # Every byte stands for two numbers, and none for NaN.
    found = {key: x.clone() for key, x in tritonfp8.export.tensors(model, format)}
    codes = found["model.layers.0.mlp.down_proj.weight_packed"]
    codes.view(-1)[:256] = torch.arange(256, dtype=torch.uint8)
    engine = engine_of("llama", format)
    Receiver(engine, format).load(found)
    assert torch.equal(engine["model.layers.0.mlp.down_proj.weight_packed"], codes)


def test_an_engine_that_made_some_tensors_in_inference_mode():
    found, engine = dict(tritonfp8.export.tensors(trainer_of("llama", "fine_grained"), "fine_grained")), {}
    for at, (name, x) in enumerate(engine_of("llama", "fine_grained").items()):
        with torch.inference_mode(at % 2 == 1):
            engine[name] = torch.nn.Parameter(x.clone(), requires_grad=False)
    Receiver(engine, "fine_grained").load(found)
    check_bits(unfused([engine], "llama", "fine_grained"), trainer_of("llama", "fine_grained"), "fine_grained")


def test_codes_are_copied_as_bytes():
    """All 254 codes that are finite, among them -0 and subnormals."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    found = {"x.weight": codes.view(torch.float8_e4m3fn)[None], "x.weight_scale": torch.full((1, 1), 3.0)}
    engine = {"x.weight": torch.ones(1, 254).to(torch.float8_e4m3fn), "x.weight_scale": torch.ones(1, 1)}
    assert Receiver(engine, "compressed_channel").load(found) == 254 + 4
    assert torch.equal(bytes_of(engine["x.weight"]), codes)
    assert engine["x.weight_scale"].item() == 3


def test_it_keeps_the_part_of_its_shard_only():
    """While the stream goes on, no whole tensor of another rank's rows is alive."""
    found = dict(tritonfp8.export.tensors(trainer_of("moe", "fine_grained"), "fine_grained"))
    alive, most = [], 0

    def counted():
        nonlocal most
        for name, x in found.items():
            x = x.clone()
            if x.dtype == torch.float8_e4m3fn:
                alive.append(weakref.ref(x.untyped_storage()))
            yield name, x
            del x
            most = max(most, sum(ref() is not None for ref in alive))

    stream = TensorStream(TensorStream.of(found).headers, counted())
    Receiver(engine_of("moe", "fine_grained", 2, 1), "fine_grained", rank=1, size=2).load(stream)
    assert len(alive) == 4 + 3 * 4
    assert most <= 2


@given(st.data())
def test_every_row_of_queries_keys_and_values_goes_to_its_ranks(data):
    """By a loop over heads, for sizes that are odd, and heads that are repeated."""
    size, dim, k = (data.draw(st.integers(1, n), name) for n, name in ((6, "ranks"), (3, "dim"), (5, "K")))
    keys = data.draw(st.sampled_from([n for n in range(1, 2 * size + 1) if size % n == 0 or n % size == 0]), "keys")
    heads = size * data.draw(st.integers(1, 3), "heads")
    numbers = iter(range(10**6))

    def projection(count):
        return torch.tensor([[next(numbers) for _ in range(k)] for _ in range(count * dim)], dtype=torch.float32)

    q, keys_, values = projection(heads), projection(keys), projection(keys)
    found = {f"x.{name}_proj.weight": x for name, x in (("q", q), ("k", keys_), ("v", values))}
    for rank in range(size):
        first = rank * keys // size
        count = max(1, keys // size)
        rows = [q.view(heads, dim, k)[rank * heads // size : (rank + 1) * heads // size]]
        rows += [x.view(keys, dim, k)[first : first + count] for x in (keys_, values)]
        expected = torch.cat([x.reshape(-1, k) for x in rows])
        engine = {"x.qkv_proj.weight": torch.full_like(expected, -1)}
        Receiver(engine, "compressed_channel", rank=rank, size=size).load(found)
        assert torch.equal(engine["x.qkv_proj.weight"], expected)


def _send(queue, taken, at_once, device):
    for seed in (0, 1):
        model = trainer_of.__wrapped__("llama", "fine_grained", seed).to(device)
        found = tritonfp8.export.tensors(model, "fine_grained")
        if at_once:
            queue.put(list(found))
            continue
        queue.put(found.headers)
        for entry in found:
            queue.put(entry)
        queue.put(None)
    # Memory that both processes see lives as long as the process that made it.
    taken.wait()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("at_once", [True, False])
def test_tensors_of_another_process_twice(at_once, device):
    """On a GPU the queue hands on handles of the memory (CUDA IPC), and the engine's rank copies its part."""
    context = torch.multiprocessing.get_context("spawn")
    queue, taken = context.SimpleQueue(), context.Event()
    process = context.Process(target=_send, args=(queue, taken, at_once, device), daemon=True)
    process.start()
    engine = {name: x.to(device) for name, x in engine_of("llama", "fine_grained", 2, 1).items()}
    expected = engine_of("llama", "fine_grained", 2, 1)
    for seed in (0, 1):
        found = queue.get() if at_once else TensorStream(queue.get(), iter(queue.get, None))
        Receiver(engine, "fine_grained", rank=1, size=2).load(found)
        Receiver(expected, "fine_grained", rank=1, size=2).load(
            tritonfp8.export.tensors(trainer_of("llama", "fine_grained", seed), "fine_grained")
        )
        assert all(torch.equal(bytes_of(x).cpu(), bytes_of(expected[name])) for name, x in engine.items())
        del found
    taken.set()
    process.join()
    assert process.exitcode == 0
