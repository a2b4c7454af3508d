"""A converted Conv1D of transformers computes by its recipe and stays the module that it was."""

import copy
import pickle

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from cases import normal, with_gradients
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.pytorch_utils import Conv1D

from tritonfp8 import convert, functional, quantize_weights_once, recipes, revert, swap_recipe
from tritonfp8.compat.counting import count_gemms
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.layers.linear import is_converted
from tritonfp8.specs.testing import assert_bitwise_equal

each_recipe = pytest.mark.parametrize("name", recipes.names())
LAYERS = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]


def layer(name=None):
    torch.manual_seed(0)
    found = nn.Sequential(Conv1D(48, 70))
    if name is not None:
        convert(found, name)
    return found


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=64, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def results(model, x):
    return with_gradients(model(x), [x, *model.parameters()], normal(*x.shape[:-1], 48, seed=1))


@each_recipe
def test_computes_as_a_linear_layer(name):
    found, x = layer(name), normal(2, 5, 70).requires_grad_()
    out, grad_input, grad_weight, grad_bias = results(found, x)
    weight, bias = found[0].weight.detach().t().requires_grad_(), found[0].bias
    linear = functional.linear(x, weight, bias, name)
    expected = with_gradients(linear, [x, weight, bias], normal(2, 5, 48, seed=1))
    assert_bitwise_equal([out, grad_input, grad_weight.t(), grad_bias], expected)
    assert (out - layer()(x)).abs().max() < 0.1


def test_revert_gives_back_the_class_and_the_parameters():
    found = layer()
    module, weight, text, expected = found[0], found[0].weight, repr(found), found(normal(5, 70))
    convert(found, "rowwise")
    assert found[0] is module
    assert isinstance(module, Conv1D)
    assert module.weight is weight
    assert list(found.state_dict()) == ["0.weight", "0.bias"]
    assert repr(module) == "Float8Conv1D(in_features=70, out_features=48, recipe='rowwise')"
    assert swap_recipe(found, "mxfp8").converted == {"0": recipes.get("mxfp8")}
    assert revert(found) == ["0"]
    assert type(module) is Conv1D
    assert repr(found) == text
    assert_bitwise_equal(found(normal(5, 70)), expected)
    assert not {"recipe", "shared_input"} & set(module.__dict__)


def test_a_gpt2():
    model = gpt2()
    parameters, ids = dict(model.named_parameters()), torch.arange(10)[None]
    report = convert(model, "rowwise")
    assert list(report.converted) == [f"transformer.h.{i}.{name}" for i in range(2) for name in LAYERS]
    assert list(report.skipped) == ["lm_head"]
    assert report.fp8_share == pytest.approx(24 * 64 / (24 * 64 + 64))
    assert all(parameters[name] is p for name, p in model.named_parameters())
    with count_gemms() as counts:
        model(ids, labels=ids).loss.backward()
    assert counts.calls == {"reference": 3 * 8}
    assert all(p.grad is not None for p in model.parameters())


def test_copies():
    found, x = layer("blockwise"), normal(5, 70)
    for twin in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), copy.copy(found)):
        assert type(twin[0]) is type(found[0])
        assert twin[0].recipe == found[0].recipe
        assert_bitwise_equal(twin(x), found(x))
    shallow = copy.copy(found[0])
    assert shallow.weight is found[0].weight
    with pytest.raises(TypeError, match="makes none: make a Conv1D and convert it"):
        type(found[0])(48, 70)


@each_recipe
def test_a_weight_that_is_quantized_once(name):
    found, x = layer(name), normal(5, 70).requires_grad_()
    expected = results(found, x)
    with quantize_weights_once(found):
        assert found[0].cached_weight is not None
        assert_bitwise_equal(results(found, x), expected)
    if name == "bf16":
        return
    with pytest.raises(RuntimeError, match="changed inside"), quantize_weights_once(found), torch.no_grad():
        found[0].weight.add_(1)


def test_compiled_and_exported():
    found, x = layer("rowwise"), normal(5, 70).requires_grad_()
    expected = results(found, x)
    assert_bitwise_equal(results(torch.compile(found, backend="aot_eager", fullgraph=True), x), expected)
    assert_bitwise_equal(torch.export.export(found, (x,)).module()(x), expected[0])


def test_an_adapter_on_a_converted_layer():
    model = gpt2()
    convert(model, "rowwise")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    ids = torch.arange(10)[None]
    with count_gemms() as counts:
        adapted(input_ids=ids, labels=ids).loss.backward()
    assert counts.calls["reference"] > 8
    assert revert(adapted)


@pytest.mark.xdist_group("ranks")
def test_sharded(tmp_path):
    """FSDP2 derives a class, and its weights are gathered in their own dtype."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found, plain, x = layer("blockwise"), layer("blockwise"), normal(5, 70)
        with pytest.raises(
            ValueError, match=r"(?s)no weight can be gathered in 8 bits: .*\n0  skipped: a Conv1D: its weight is stored"
        ):
            enable_float8_all_gather(found)
        fully_shard(found[0])
        assert_bitwise_equal(found(x), plain(x))
        assert revert(found) == ["0"]
        assert isinstance(found[0], Conv1D)
        assert isinstance(found[0], FSDPModule)
        assert not is_converted(found[0])
        assert_bitwise_equal(found(x), layer()(x))
    finally:
        dist.destroy_process_group()


def test_another_class_of_this_name_is_left_alone():
    other = type("Conv1D", (Conv1D,), {})
    model = nn.Sequential(other(32, 32), nn.Linear(32, 32))
    report = convert(model, "rowwise")
    assert list(report.converted) == ["1"]
    assert report.high_precision["0.weight"].reason == "of Conv1D, which is no nn.Linear"
    own = nn.Sequential(Conv1D(32, 32), nn.Linear(32, 32))
    own[0].forward = lambda x: x
    assert "forward was replaced" in convert(own, "rowwise").skipped["0"]
