"""What does not fit is an error that says what to do, before anything is written; Ctrl-C leaves old or new weights."""

import signal

import pytest
import torch
from engines import bytes_of, engine_of, trainer_of

import tritonfp8
from tritonfp8.export import TensorStream
from tritonfp8.rollout import Receiver, receiver

FORMAT = "compressed_channel"
QKV, LAST = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.down_proj.weight"
KEY = "model.layers.0.self_attn.k_proj"


def stream(kind="llama", format=FORMAT):
    return dict(tritonfp8.export.tensors(trainer_of(kind, format), format))


def bits(engine):
    return {name: bytes_of(x).clone() for name, x in engine.items()}


def same(engine, expected):
    return all(torch.equal(x, expected[name]) for name, x in bits(engine).items())


def nan(x):
    x = x.clone()
    x.view(torch.uint8).view(-1)[-1] = 0xFF
    return x


def negative(x):
    x = x.clone()
    x[-1] *= -1
    return x


MISTAKES = {
    "missing": ("model.norm.weight", None, r"does not have these tensors of the engine: model.norm.weight"),
    "missing part": (f"{KEY}.weight", None, rf"{QKV}.weight of the engine also needs {KEY}.weight"),
    "missing bias": (f"{KEY}.bias", None, rf"{QKV}.bias of the engine also needs {KEY}.bias"),
    "unknown": ("other", lambda _: torch.ones(2), r"no place for these tensors of the stream: other"),
    "rows": (f"{KEY}.bias", lambda x: x[:-1], rf"{QKV}.bias of the engine has shape \(1024,\): it is neither all of"),
    "columns": ("lm_head.weight", lambda x: x[:, :-1], r"lm_head.weight of the engine has shape"),
    "vocabulary": ("lm_head.weight", lambda x: x[:60], r"lm_head.weight of the engine has shape"),
    "dims": ("model.norm.weight", lambda x: x[None], r"model.norm.weight of the engine has shape"),
    "no scale": (f"{LAST}_scale", None, rf"needs {LAST}_scale of torch.float32 \(512, 1\); got none"),
    "grid": (f"{LAST}_scale", lambda x: x[:64], r"got torch.float32 \(64, 1\). The stream is of another format"),
    "dtype of a scale": (f"{LAST}_scale", lambda x: x.bfloat16(), r"got torch.bfloat16"),
    "infinite": (f"{LAST}_scale", lambda x: x * torch.inf, f"{LAST}_scale must be finite and not negative"),
    "NaN": (f"{LAST}_scale", lambda x: x * torch.nan, f"{LAST}_scale must be finite and not negative"),
    "negative": (f"{LAST}_scale", negative, f"{LAST}_scale must be finite and not negative"),
    "codes": (LAST, nan, f"{LAST} must be finite; it has codes that are NaN"),
    "matrix": (LAST, lambda x: x[None], f"{LAST} has codes and must be a matrix"),
    "values": (LAST, lambda x: x.bfloat16(), f"{LAST} is torch.bfloat16, and {LAST} of the engine torch.float8_e4m3fn"),
    "other codes": (LAST, lambda x: x.float().to(torch.float8_e5m2), "is torch.float8_e5m2"),
    "rounded": ("model.norm.weight", lambda x: x.float(), "export in its dtype, with dtype="),
    "integers": ("model.norm.weight", lambda x: x.short(), "export in its dtype, with dtype="),
    "no tensor": ("model.norm.weight", lambda x: x.tolist(), "the tensor 'model.norm.weight' must be a tensor"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_changes_nothing(mistake):
    name, change, message = MISTAKES[mistake]
    found, engine = stream(), engine_of("llama", FORMAT)
    before = bits(engine)
    if change is None:
        del found[name]
    else:
        found[name] = change(found.get(name))
    with pytest.raises(TypeError if mistake == "no tensor" else ValueError, match=message):
        Receiver(engine, FORMAT).load(found)
    assert same(engine, before)


def test_codes_for_an_engine_in_high_precision_is_an_error():
    engine = engine_of("llama", FORMAT)
    before = bits(engine)
    wrong = engine | {LAST: torch.ones(512, 512, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=f"{LAST} is torch.float8_e4m3fn, and {LAST} of the engine torch.bfloat16"):
        Receiver(wrong, FORMAT).load(stream())
    assert same(engine, before)


@pytest.mark.parametrize(
    ("made", "told", "message"),
    [
        (
            "fine_grained",
            FORMAT,
            r"needs .*weight_scale of torch.float32 .*; got none. The stream is of another format",
        ),
        ("compressed_mxfp8", FORMAT, r"got torch.uint8 \(512, 16\). The stream is of another format"),
        (FORMAT, "compressed_mxfp8", r"got torch.float32 \(512, 1\). The stream is of another format"),
        ("compressed_mxfp4", "compressed_mxfp8", r"does not have these tensors of the engine|no place for"),
        ("compressed_mxfp8", "compressed_mxfp4", r"needs .* torch.uint8 \(512, 32\); got torch.uint8 \(512, 16\)"),
    ],
)
def test_another_format(made, told, message):
    engine = engine_of("llama", told)
    before = bits(engine)
    with pytest.raises(ValueError, match=message):
        Receiver(engine, told).load(stream(format=made))
    assert same(engine, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda codes, scale: {scale: None}, r"needs .*down_proj.weight_scale of torch.uint8 \(512, 16\); got none"),
        (lambda codes, scale: {scale: torch.full((512, 16), 255, dtype=torch.uint8)}, "weight_scale must be finite"),
        (lambda codes, scale: {codes: torch.ones(512, 255, dtype=torch.uint8)}, "neither all of .*512, 255"),
        (lambda codes, scale: {codes: torch.ones(512, 256)}, r"weight_packed is torch.float32, and .* torch.uint8"),
        (
            lambda codes, scale: {codes: None, codes.removesuffix("_packed"): torch.ones(512, 512).bfloat16()},
            "no place for|does not have",
        ),
    ],
)
def test_damaged_codes_of_two_a_byte(change, message):
    format, name = "compressed_mxfp4", "model.layers.0.mlp.down_proj.weight"
    found, engine = dict(stream(format=format)), engine_of("llama", format)
    changes, before = change(f"{name}_packed", f"{name}_scale"), bits(engine)
    found = {key: x for key, x in (found | changes).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        Receiver(engine, format).load(found)
    assert same(engine, before)


def test_an_engine_of_another_format():
    engine = engine_of("llama", "fine_grained")
    with pytest.raises(ValueError, match=rf"needs {QKV}.weight_scale of shape \(1024, 1\); got none"):
        Receiver(engine, FORMAT).load(stream())
    engine = engine_of("llama", FORMAT)
    half = engine | {f"{QKV}.weight_scale": torch.ones(1024, 1).half()}
    with pytest.raises(
        ValueError, match=rf"a scale of the stream is torch.float32, and {QKV}.weight_scale of the engine"
    ):
        Receiver(half, FORMAT).load(stream())
    engine[f"{QKV}.weight_scale"] = torch.ones(3)
    with pytest.raises(ValueError, match=rf"needs {QKV}.weight_scale of shape \(1024, 1\); got \(3,\)"):
        Receiver(engine, FORMAT).load(stream())


def test_a_name_that_comes_twice_and_streams_that_are_not_as_announced():
    found, engine = list(stream().items()), engine_of("llama", FORMAT)
    before = bits(engine)
    with pytest.raises(ValueError, match="came twice"):
        Receiver(engine, FORMAT).load([*found, found[0]])
    longer, turned = [*found, ("other", torch.ones(1))], [*found[1:], found[0]]
    others = [(name, x[:1] if name == LAST else x) for name, x in found]
    numbers = [(name, x.tolist() if name == LAST else x) for name, x in found]
    for tensors in (found[:-1], found[1:], longer, turned, others, numbers):
        announced = TensorStream.of(dict(found))
        with pytest.raises(ValueError, match="the stream must go on with .*, as announced; got"):
            Receiver(engine, FORMAT).load(TensorStream(announced.headers, tensors))
    begun = tritonfp8.export.tensors(trainer_of("llama", FORMAT), FORMAT)
    next(begun)
    with pytest.raises(ValueError, match="from its beginning"):
        Receiver(engine, FORMAT).load(begun)
    assert same(engine, before)


def test_a_stream_that_breaks_off_changes_nothing():
    def broken(found):
        for at, entry in enumerate(found.items()):
            if at == 9:
                raise ConnectionResetError("the trainer is gone")
            yield entry

    found, engine = stream(), engine_of("llama", FORMAT)
    before = bits(engine)
    for tensors in (broken(found), TensorStream(TensorStream.of(found).headers, broken(found))):
        with pytest.raises(ConnectionResetError, match="the trainer is gone"):
            Receiver(engine, FORMAT).load(tensors)
    assert same(engine, before)


def test_blocks_that_a_shard_cuts():
    model = trainer_of("llama", "fine_grained")
    engine = engine_of("llama", "fine_grained", 8)
    with pytest.raises(ValueError, match=r"cut blocks of 128 that have one scale: use fewer ranks"):
        Receiver(engine, "fine_grained", rank=1, size=8).load(tritonfp8.export.tensors(model, "fine_grained"))


def test_arguments():
    engine = engine_of("llama", FORMAT)
    for message, options in (
        ("format must be", {"format": "rowwise"}),
        ("use 'compressed_channel'", {"format": "compressed_tensor"}),
        ("rank must be", {"rank": 2, "size": 2}),
        ("experts must be", {"experts": ()}),
        ("experts must be", {"experts": (-1,)}),
    ):
        with pytest.raises(ValueError, match=message):
            Receiver(engine, **{"format": FORMAT} | options)
    for message, tensors, options in (
        ("tensors must be", list(engine), {}),
        ("the tensor 'x' must be", {"x": 1}, {}),
        ("ignore must be", engine, {"ignore": "x"}),
    ):
        with pytest.raises(TypeError, match=message):
            Receiver(tensors, FORMAT, **options)


def test_ignore_is_for_names_without_a_partner():
    found, engine = stream(), engine_of("llama", FORMAT)
    engine["rotary.cache"] = kept = torch.ones(3)
    del engine["lm_head.weight"]
    ignore = ["lm_head.*", "rotary.*"]
    Receiver(engine, FORMAT, ignore=ignore).load(found)
    assert torch.equal(kept, torch.ones(3))
    assert torch.equal(engine["model.norm.weight"], found["model.norm.weight"])
    with pytest.raises(ValueError, match=r"'\*_scale' of ignore match no tensor without a partner"):
        Receiver(engine, FORMAT, ignore=[*ignore, "*_scale"]).load(found)


def interrupted(items, at):
    """These, with Ctrl-C before one of them."""
    for index, item in enumerate(items):
        if index == at:
            signal.raise_signal(signal.SIGINT)
        yield item


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("at", [0, 7])
def test_ctrl_c_while_it_is_written_leaves_the_new_weights(monkeypatch, at):
    engine, expected = engine_of("llama", FORMAT), engine_of("llama", FORMAT)
    Receiver(expected, FORMAT).load(stream())
    real, calls = receiver._write, []

    def write(writes):
        calls.append(len(writes))
        return real(interrupted(writes, at))

    monkeypatch.setattr(receiver, "_write", write)
    with pytest.raises(KeyboardInterrupt):
        Receiver(engine, FORMAT).load(stream())
    assert calls[0] > at
    assert same(engine, bits(expected))


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_in_a_stream_leaves_the_old_weights():
    engine, found = engine_of("llama", FORMAT), stream()
    before, last = bits(engine), len(found) - 1
    with pytest.raises(KeyboardInterrupt):
        Receiver(engine, FORMAT).load(TensorStream(TensorStream.of(found).headers, interrupted(found.items(), last)))
    assert same(engine, before)
