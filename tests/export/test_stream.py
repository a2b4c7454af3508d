"""The tensors of an export: names, order, one layer in memory; and a copy that takes them, whole or not at all."""

import gc
import signal
import weakref

import pytest
import torch
import torch.multiprocessing
from checkpoints import EXPERTS, WHOLE, are_equal, files_of, model_of
from checkpoints import FORMATS as ALL_FORMATS
from torch import nn

import tritonfp8
from tritonfp8.compat import uninterrupted
from tritonfp8.export import reading
from tritonfp8.layers.stored import StoredMatrices, StoredWeight

# The checkpoint format that has the blocks of a recipe.
FORMATS = {"rowwise": "compressed_channel", "blockwise": "fine_grained", "mxfp8": "compressed_mxfp8"}
FAMILIES = {"qwen3": WHOLE, "moe": EXPERTS}
IDS = torch.arange(48).reshape(2, 24) % 64


@pytest.mark.parametrize("format", ALL_FORMATS)
def test_it_gives_what_save_writes(tmp_path, format):
    model = model_of("qwen3", tie_word_embeddings=True)
    tritonfp8.export.save(model, tmp_path, format)
    stored = files_of(tmp_path)
    found = list(tritonfp8.export.tensors(model, format))
    assert {name for name, _ in found} == set(stored)
    assert len(found) == len(stored)
    for name, x in found:
        assert x.dtype == stored[name].dtype
        assert x.is_contiguous()
        assert not x.requires_grad
        assert torch.equal(x.view(torch.uint8), stored[name].view(torch.uint8)), name


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("format", ALL_FORMATS)
def test_headers_tell_what_comes_before_it_is_quantized(kind, format):
    found = tritonfp8.export.tensors(model_of(kind, FAMILIES[kind]), format, dtype=torch.float16)
    headers = dict(found.headers)
    came = list(found.checked())
    assert list(headers) == [name for name, _ in came]
    assert {name: (x.dtype, tuple(x.shape)) for name, x in came} == {name: x[1:] for name, x in headers.items()}
    assert sum(x.nbytes for x in headers.values()) == sum(x.nbytes for _, x in came)


def test_a_scale_follows_its_codes_and_gradients_are_recorded_between_steps():
    names = []
    for name, _ in tritonfp8.export.tensors(model_of(), "fine_grained"):
        names.append(name)
        assert torch.is_grad_enabled()
    scales = [at for at, name in enumerate(names) if name.endswith("_scale_inv")]
    assert len(scales) == 7
    assert all(names[at] == f"{names[at - 1]}_scale_inv" for at in scales)


def test_it_holds_one_layer_at_a_time():
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(6)))
    alive, most = [], 0
    gc.disable()
    try:
        for _, x in tritonfp8.export.tensors(model, "compressed_channel"):
            alive.append(weakref.ref(x.untyped_storage()))
            del x
            most = max(most, sum(ref() is not None for ref in alive))
    finally:
        gc.enable()
    assert len(alive) == 12
    # The storage object of a tensor dies with it, so only what the iterator holds is counted.
    assert most <= 2


def test_layers_are_quantized_when_they_are_asked_for():
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2)))
    stream = tritonfp8.export.tensors(model, "compressed_tensor")
    first = [next(stream), next(stream)]
    with torch.no_grad():
        for layer in model:
            layer.weight.fill_(3.0)
    second = [next(stream), next(stream)]
    assert first[0][1].float().unique().numel() > 2
    assert torch.equal(second[0][1].float() * second[1][1], torch.full((128, 128), 3.0))


def test_tensors_in_high_precision_are_not_copied_unless_cast():
    model = model_of()
    embedding = model.model.embed_tokens.weight
    found = dict(tritonfp8.export.tensors(model, "fine_grained"))
    assert found["model.embed_tokens.weight"].data_ptr() == embedding.data_ptr()
    found = dict(tritonfp8.export.tensors(model, "fine_grained", dtype=torch.float16))
    assert torch.equal(found["model.embed_tokens.weight"], embedding.half())
    norm = nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128))
    found = dict(tritonfp8.export.tensors(norm, "compressed_channel", dtype=torch.bfloat16))
    assert found["1.num_batches_tracked"].dtype == torch.int64
    assert found["1.running_var"].dtype == torch.bfloat16


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", ALL_FORMATS)
def test_a_weight_that_is_not_finite_is_an_error(tmp_path, format, value):
    model = model_of()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[3, 5] = value
    with pytest.raises(ValueError, match=r"model.layers.0.mlp.down_proj.weight has a NaN or an infinity"):
        tritonfp8.export.save(model, tmp_path, format)
    assert list(tmp_path.iterdir()) == []


def trainer_of(recipe, kind="qwen3"):
    model = model_of(kind, FAMILIES[kind])
    tritonfp8.convert(model, recipe)
    return model


def copy_of(recipe, kind="qwen3"):
    """A model with other weights, stored in 8 bits."""
    model = model_of(kind, FAMILIES[kind], seed=1)
    tritonfp8.convert(model, recipe, mode="inference")
    return model


def tensors_inside(model):
    """Every tensor of a model that has memory, by name; of a stored weight the codes and scales."""
    found = {}
    for name, x in [*model.named_parameters(), *model.named_buffers()]:
        stored = isinstance(x, StoredWeight | StoredMatrices)
        found |= {f"{name} codes": x._qdata, f"{name} scales": x._scale} if stored else {name: x.detach()}
    assert sum(name.endswith("codes") for name in found) in (0, 4 + 2, 7)
    return found


def bits_of(model):
    return {name: x.contiguous().view(torch.uint8).clone() for name, x in tensors_inside(model).items()}


def stream(model, recipe="rowwise"):
    return tritonfp8.export.tensors(model, FORMATS[recipe])


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("recipe", FORMATS)
def test_after_each_step_a_copy_has_the_logits_of_the_trainer(recipe, kind):
    trainer, copy = trainer_of(recipe, kind), copy_of(recipe, kind)
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    places = {name: x.data_ptr() for name, x in tensors_inside(copy).items()}
    seen = []
    for _ in range(3):
        trainer(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report = tritonfp8.export.load_tensors(copy, stream(trainer, recipe), FORMATS[recipe])
        assert report.layers
        assert {layer.again for layer in report.layers.values()} == {"codes kept"}
        with torch.no_grad():
            seen.append(copy(IDS).logits)
            assert torch.equal(seen[-1], trainer(IDS).logits)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[1], seen[2])
    # Graphs that were captured before read the new weights.
    assert places == {name: x.data_ptr() for name, x in tensors_inside(copy).items()}


def _without(name):
    return lambda found: found.pop(name)


def _with(name, change):
    return lambda found: found.update({name: change(found.get(name))})


def _nan(x):
    x = x.clone()
    x.view(torch.uint8).view(-1)[-1] = 0x7F
    return x


LAST = "model.layers.0.mlp.down_proj.weight"
MISTAKES = {
    "missing": (_without("lm_head.weight"), r"does not have these tensors of the model: lm_head.weight"),
    "unknown": (_with("other", lambda _: torch.ones(2)), r"no place for these tensors of the checkpoint: other"),
    "shape": (_with(LAST, lambda x: x[:, :128]), rf"{LAST} must have shape \(128, 256\)"),
    "no scale": (_without(f"{LAST}_scale"), rf"{LAST} has codes and needs one scale"),
    "dtype of the scale": (_with(f"{LAST}_scale", lambda x: x.int()), "must be torch.float32"),
    "grid": (_with(f"{LAST}_scale", lambda x: x[:64]), r"_scale must have shape \(128, 1\)"),
    "scale": (_with(f"{LAST}_scale", lambda x: x * float("inf")), "must be finite and not negative"),
    "codes": (_with(LAST, _nan), f"{LAST} must be finite"),
    "values": (_with("lm_head.weight", lambda x: x.double() * 1e300), "lm_head.weight must be finite"),
    "no tensor": (_with("lm_head.weight", lambda x: x.tolist()), "the tensor 'lm_head.weight' must be a tensor"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_changes_nothing(mistake):
    change, message = MISTAKES[mistake]
    found, copy = dict(stream(trainer_of("rowwise"))), copy_of("rowwise")
    before = bits_of(copy)
    change(found)
    with pytest.raises(ValueError if mistake != "no tensor" else TypeError, match=message):
        tritonfp8.export.load_tensors(copy, found, "compressed_channel")
    assert are_equal(bits_of(copy), before)


def test_a_format_of_other_blocks_and_a_name_that_comes_twice_change_nothing():
    found, copy = list(stream(trainer_of("rowwise"))), copy_of("rowwise")
    before = bits_of(copy)
    for tensors, format, message in (
        (found, "fine_grained", "must have shape"),
        (found, "rowwise", "format must be"),
        ([*found, found[0]], "compressed_channel", "came twice"),
    ):
        with pytest.raises(ValueError, match=message):
            tritonfp8.export.load_tensors(copy, tensors, format)
    assert are_equal(bits_of(copy), before)


def test_a_stream_that_breaks_off_changes_nothing():
    def broken():
        for index, entry in enumerate(stream(trainer_of("rowwise"))):
            if index == 9:
                raise ConnectionResetError("the trainer is gone")
            yield entry

    copy = copy_of("rowwise")
    before = bits_of(copy)
    with pytest.raises(ConnectionResetError, match="the trainer is gone"):
        tritonfp8.export.load_tensors(copy, broken(), "compressed_channel")
    assert are_equal(bits_of(copy), before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("at", [0, 5])
def test_ctrl_c_leaves_the_new_weights(monkeypatch, at):
    trainer, copy, expected = trainer_of("rowwise"), copy_of("rowwise"), copy_of("rowwise")
    tritonfp8.export.load_tensors(expected, stream(trainer), "compressed_channel")
    real, calls = reading.copy_whole, []

    def interrupted(*args):
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(reading, "copy_whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tritonfp8.export.load_tensors(copy, stream(trainer), "compressed_channel")
    assert len(calls) > at
    assert are_equal(bits_of(copy), bits_of(expected))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_after_an_error_is_not_lost():
    with pytest.raises(KeyboardInterrupt) as found, uninterrupted():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise ValueError("first")
    assert str(found.value.__context__) == "first"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _send(queue, taken):
    queue.put(list(stream(trainer_of("rowwise"))))
    # Memory that both processes see lives as long as the process that made it.
    taken.wait()


def test_tensors_of_another_process():
    context = torch.multiprocessing.get_context("spawn")
    queue, taken = context.SimpleQueue(), context.Event()
    process = context.Process(target=_send, args=(queue, taken), daemon=True)
    process.start()
    copy, expected = copy_of("rowwise"), copy_of("rowwise")
    tritonfp8.export.load_tensors(copy, queue.get(), "compressed_channel")
    taken.set()
    process.join()
    assert process.exitcode == 0
    tritonfp8.export.load_tensors(expected, stream(trainer_of("rowwise")), "compressed_channel")
    assert are_equal(bits_of(copy), bits_of(expected))


def test_a_model_with_values_and_a_model_on_the_meta_device():
    trainer, plain = trainer_of("blockwise"), model_of("qwen3", seed=1)
    report = tritonfp8.export.load_tensors(plain, dict(stream(trainer, "blockwise")), "fine_grained")
    assert len(report.layers) == 7
    spec = tritonfp8.recipes.get("blockwise").output.rhs
    expected = {
        name: tritonfp8.dequantize(tritonfp8.quantize(x, spec), x.dtype)
        if name.removesuffix(".weight") in report.layers
        else x
        for name, x in trainer.named_parameters()
    }
    assert all(torch.equal(x, expected[name]) for name, x in plain.named_parameters())
    with torch.device("meta"):
        empty = model_of("qwen3", dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="buffers, which are on the meta device"):
        tritonfp8.export.load_tensors(empty, stream(trainer, "blockwise"), "fine_grained")
    assert all(torch.equal(x, y) for x, y in zip(empty.parameters(), plain.parameters(), strict=True))
