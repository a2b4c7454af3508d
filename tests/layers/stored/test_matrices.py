"""Weights of experts that are stored in 8 bits: the bits of plain experts of the same values, at half of the memory."""

import copy
import io
import os
import pickle

import pytest
import torch
from cases import cpu_and_cuda, normal
from mixtures import FAMILIES, experts_of, model_of
from torch import nn
from transformers import AutoModelForCausalLM

import tritonfp8
from tritonfp8 import Float8Experts, recipes
from tritonfp8.layers import stored
from tritonfp8.layers.stored import MatricesShard, StoredMatrices
from tritonfp8.specs.testing import assert_bitwise_equal

QUANTIZED = [name for name in recipes.names() if recipes.get(name).output.rhs is not None]
each_recipe = pytest.mark.parametrize("name", QUANTIZED)
each_family = pytest.mark.parametrize("family", FAMILIES)
# Experts, features of a token, and inside of an expert: no multiples of the blocks.
EXPERTS, HIDDEN, INSIDE = 4, 144, 112
IDS = torch.arange(24).reshape(2, 12) * 7 % 96


def experts(recipe, dtype=torch.bfloat16, device="cpu", bias=True):
    torch.manual_seed(0)
    return Float8Experts(EXPERTS, HIDDEN, INSIDE, recipe=recipe, bias=bias, dtype=dtype).to(device)


def stored_and_plain(name, dtype=torch.bfloat16, device="cpu"):
    """Experts with stored weights, and plain ones of their values with the same recipe."""
    module = experts(name, dtype, device)
    tritonfp8.convert(module, name, mode="inference")
    plain = experts(module.recipe, dtype, device)
    plain.load_state_dict(module.state_dict())
    for each in (plain.gate_up_proj, plain.down_proj):
        each.requires_grad_(False)
    return module, plain


def batch(dtype=torch.bfloat16, device="cpu"):
    generator = torch.Generator().manual_seed(1)
    index = torch.rand(29, EXPERTS, generator=generator).topk(2).indices
    # The last expert has no token.
    index = torch.where(index == EXPERTS - 1, 0, index)
    return normal(29, HIDDEN, dtype=dtype).to(device), index.to(device), normal(29, 2, seed=2).to(device, dtype)


def results(call, module, inputs):
    """Output, and the gradients of the tokens, of the router's weights and of the biases."""
    hidden, index, weights = inputs
    leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
    out = call(leaves[0], index, leaves[1])
    out.float().square().sum().backward()
    grads = [p.grad for p in module.parameters() if p.requires_grad]
    assert len(grads) == 2
    for p in module.parameters():
        p.grad = None
    return [out.detach(), *(leaf.grad for leaf in leaves), *grads]


@cpu_and_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@each_recipe
def test_the_bits_of_plain_experts(name, dtype, device):
    module, plain = stored_and_plain(name, dtype, device)
    inputs = batch(dtype, device)
    assert_bitwise_equal(results(module, module, inputs), results(plain, plain, inputs))
    for weight in (module.gate_up_proj, module.down_proj):
        assert type(weight) is StoredMatrices
        assert isinstance(weight, nn.Parameter)
        assert weight.nbytes <= 1.04 * weight.numel()
        assert not weight.requires_grad


@each_recipe
def test_codes_and_values_are_those_of_each_matrix_alone(name):
    module, _ = stored_and_plain(name)
    weight = module.gate_up_proj
    plain = experts(name).gate_up_proj.detach()
    for i, matrix in enumerate(plain):
        alone = stored.store(matrix, weight.spec)
        assert_bitwise_equal([weight._qdata[i]], [alone._qdata])
        assert torch.equal(weight._scale[i].float(), alone._scale.float())
        assert_bitwise_equal([weight.dequantize()[i]], [alone.dequantize()])
    again = StoredMatrices.of(weight.dequantize(), weight.spec)
    assert_bitwise_equal([again.dequantize()], [weight.dequantize()])


@each_recipe
def test_under_autocast(name):
    module, plain = stored_and_plain(name, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (results(each, each, batch(torch.float32)) for each in (module, plain))
    assert_bitwise_equal(ours, theirs)


@each_recipe
def test_in_one_graph(name):
    torch._dynamo.reset()
    module, plain = stored_and_plain(name)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal(results(compiled, module, batch()), results(plain, plain, batch()))


@cpu_and_cuda
def test_through_inductor(device):
    torch._dynamo.reset()
    module, _ = stored_and_plain("rowwise", device=device)
    inputs = batch(device=device)
    with torch.no_grad():
        expected = module(*inputs)
        assert_bitwise_equal([torch.compile(module, fullgraph=True)(*inputs)], [expected])


@pytest.mark.parametrize("before", [False, True], ids=["converted now", "converted before"])
def test_a_report_names_experts_that_keep_their_weights(before):
    """Experts that train follow their recipe, and cannot do so by stored weights."""
    model = model_of("mixtral")
    if before:
        assert tritonfp8.convert(model, "rowwise").unstored_experts == {}
    report = tritonfp8.convert(model, "tensorwise", weight_storage="quantized")
    why = "they train: requires_grad_(False) or mode='inference' lets them be stored"
    assert report.unstored_experts == dict.fromkeys(experts_of(model), why)
    assert "model.layers.*.mlp.experts (2x)" in str(report)
    assert f"4 experts, weights in high precision: {why}" in str(report)
    for each in experts_of(model).values():
        assert {type(p) for p in each.parameters()} == {nn.Parameter}
        assert each.recipe.name == ("rowwise" if before else "tensorwise")
        assert each.down_proj.requires_grad
    assert report.stored_bytes[0] > 0
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert all(each.down_proj.grad is not None for each in experts_of(model).values())
    assert tritonfp8.convert(model, "rowwise", mode="inference").unstored_experts == {}


@each_family
def test_a_model_of_transformers_generates_what_its_values_do(family, tmp_path):
    model, plain = (model_of(family, torch.bfloat16).eval() for _ in range(2))
    report = tritonfp8.convert(model, "rowwise", mode="inference")
    assert report.experts.keys() == experts_of(model).keys()
    plain.load_state_dict(model.state_dict())
    tritonfp8.convert(plain, "rowwise")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    found, wanted = (
        each.generate(IDS, **options, cache_implementation="static", return_dict_in_generate=True)
        for each in (model, plain)
    )
    assert torch.equal(found.sequences, wanted.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(wanted.logits))
    rows = str(tritonfp8.verify(model, input_ids=IDS)).splitlines()
    of_experts = [row for row in rows if row.startswith(tuple(experts_of(model)))]
    assert len(of_experts) == len(experts_of(model))
    assert all("e4m3 x e4m3" in row for row in of_experts)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    ours = {name: x for name, x in model.state_dict().items() if ".experts." in name}
    assert_bitwise_equal([loaded[name] for name in ours], list(ours.values()))


def test_weights_that_lie_transposed_have_their_codes_in_the_order_of_rows():
    model = model_of("gpt_oss", torch.bfloat16)
    before = next(iter(experts_of(model).values())).gate_up_proj.detach().clone()
    tritonfp8.convert(model, "rowwise", mode="inference")
    weight = next(iter(experts_of(model).values())).gate_up_proj
    expected = StoredMatrices.of(before.mT, weight.spec)
    assert weight.is_transposed
    assert weight.shape == before.shape
    assert_bitwise_equal([weight._qdata], [expected._qdata])
    assert_bitwise_equal([weight.dequantize()], [expected.dequantize().mT])


def test_the_state_dict_has_plain_values_and_loads_either_way():
    module, _ = stored_and_plain("blockwise")
    state = experts("blockwise").state_dict()
    assert {type(x) for x in module.state_dict().values()} == {torch.Tensor}
    expected = module.gate_up_proj._qdata.clone()
    for assign in (False, True):
        with torch.no_grad():
            module.gate_up_proj.fill_(1.0)
        module.load_state_dict(state, assign=assign)
        assert type(module.gate_up_proj) is StoredMatrices
        assert_bitwise_equal([module.gate_up_proj._qdata], [expected])
    module.gate_up_proj = nn.Parameter(state["gate_up_proj"] * 2)
    assert type(module.gate_up_proj) is StoredMatrices
    assert_bitwise_equal([module.gate_up_proj._qdata], [expected])


def test_initialization_is_in_high_precision():
    module, plain = stored_and_plain("rowwise")
    for each in (module, plain):
        torch.manual_seed(3)
        each.reset_parameters()
    assert type(module.down_proj) is StoredMatrices
    expected = StoredMatrices.of(plain.down_proj, module.down_proj.spec)
    assert_bitwise_equal([module.down_proj._qdata], [expected._qdata])


def test_copies_keep_the_codes():
    module, _ = stored_and_plain("mxfp8")
    module.requires_grad_(False)
    expected = module(*batch())
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    sent = pickle.loads(pickle.dumps(module))
    for other in (copy.deepcopy(module), torch.load(file, weights_only=False), module.to("cpu"), sent):
        assert type(other.gate_up_proj) is StoredMatrices
        assert_bitwise_equal([other(*batch())], [expected])
    module.float()
    assert module.gate_up_proj.dtype == torch.float32
    assert module(*batch(torch.float32)).dtype == torch.float32


def test_others_read_the_values_and_write_to_them():
    module, _ = stored_and_plain("rowwise")
    weight, values = module.gate_up_proj, module.gate_up_proj.dequantize()
    x = normal(EXPERTS, 3, HIDDEN, dtype=torch.bfloat16)
    assert torch.equal(torch.bmm(x, weight.mT), torch.bmm(x, values.mT))
    assert torch.equal(nn.functional.linear(x[0], weight[1]), nn.functional.linear(x[0], values[1]))
    with torch.no_grad():
        weight[2].fill_(2.0)
    assert (weight.dequantize()[2] == 2).all()
    assert torch.equal(weight.dequantize()[:2], values[:2])
    with pytest.raises(NotImplementedError, match=r"does not work on a weight that is stored in 8 bits"):
        weight.add_(1)


def test_an_exported_program_holds_codes(tmp_path):
    module, _ = stored_and_plain("rowwise")
    with torch.no_grad():
        program = torch.export.export(module, batch())
        torch.export.save(program, tmp_path / "stored.pt2")
        found = torch.export.load(tmp_path / "stored.pt2")
        assert_bitwise_equal([found.module()(*batch())], [module(*batch())])
    decomposed = found.run_decompositions()
    held = {tuple(x.shape): x.dtype for x in decomposed.state_dict.values()}
    assert held[EXPERTS, 2 * INSIDE, HIDDEN] == torch.float8_e4m3fn
    gemm = torch.ops.tritonfp8.scaled_grouped_matmul.default
    assert len(decomposed.graph.find_nodes(op="call_function", target=gemm)) == 2
    assert os.path.getsize(tmp_path / "stored.pt2") < 2 * sum(p.numel() for p in module.parameters())


def test_experts_that_were_trained_are_stored_later():
    model = model_of("mixtral", torch.bfloat16)
    tritonfp8.convert(model, "tensorwise")
    report = tritonfp8.convert(model, "rowwise", mode="inference")
    for name, each in experts_of(model).items():
        assert type(each.down_proj) is StoredMatrices
        assert report.already[name].name == each.recipe.name == "tensorwise_stored"
    now, before = report.stored_bytes
    assert now < 0.51 * before


def test_recipes_with_the_same_weights_are_swapped_and_others_refused():
    module, _ = stored_and_plain("rowwise")
    model = nn.ModuleDict({"experts": module})
    tritonfp8.swap_recipe(model, "rowwise_hp_grad_weight")
    assert module.recipe.name == "rowwise_hp_grad_weight"
    with pytest.raises(ValueError, match="the weight of experts is stored as e4m3 rowwise.*convert the model again"):
        tritonfp8.swap_recipe(model, "blockwise")
    module.recipe = recipes.get("blockwise")
    with pytest.raises(ValueError, match="is stored as e4m3 rowwise.*and its recipe reads e4m3 128x128"):
        module(*batch())


def test_revert_gives_plain_weights_of_the_values():
    model = model_of("qwen3_moe", torch.bfloat16)
    before = {name: type(each) for name, each in experts_of(model).items()}
    tritonfp8.convert(model, "rowwise", mode="inference")
    values = model.state_dict()
    tritonfp8.revert(model)
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    assert_bitwise_equal(list(model.state_dict().values()), list(values.values()))
    for name, each in experts_of(model).items():
        assert type(each) is before[name]
        assert not each._state_dict_hooks
        assert not each._load_state_dict_pre_hooks
        assert not {"on_revert", "on_reset", "on_assign", "recipe"} & each.__dict__.keys()


def test_quantize_weights_once_has_nothing_to_do():
    module, _ = stored_and_plain("rowwise")
    expected = results(module, module, batch())
    with tritonfp8.quantize_weights_once(module):
        assert not module.cached_weights
        assert_bitwise_equal(results(module, module, batch()), expected)


def test_a_base_that_is_frozen_is_stored_beside_weights_that_train():
    model = model_of("qwen3_moe")
    for each in experts_of(model).values():
        each.requires_grad_(False)
    tritonfp8.convert(model, "rowwise", weight_storage="quantized")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = tritonfp8.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    moved = {name for name, p in model.state_dict().items() if not torch.equal(p, _values(before[name]))}
    assert moved == {name for name in before if ".experts." not in name}


def _values(weight):
    return weight.dequantize() if hasattr(weight, "dequantize") and type(weight) is not torch.Tensor else weight


def trained(model):
    return {"weight_storage": "quantized"}, model.float()


def half_precision(model):
    return {"mode": "inference"}, model.half()


def in_high_precision(model):
    return {"mode": "inference", "recipe": {"*.experts": "bf16", "*": "rowwise"}}, model


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (trained, r"weights of model.layers.0.mlp.experts require a gradient.*freeze them by requires_grad_\(False\)"),
        (half_precision, "its weight is torch.float16: cast the model"),
        (in_high_precision, "experts: recipe 'bf16' computes the output in high precision: leave the layer out"),
    ],
)
def test_what_cannot_be_stored_is_an_error_and_nothing_is_converted(case, message):
    options, model = case(model_of("mixtral", torch.bfloat16))
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        tritonfp8.convert(model, **{"recipe": "rowwise", "experts": True, **options})
    assert [type(module) for module in model.modules()] == before


def test_a_failure_in_the_middle_leaves_plain_weights(monkeypatch):
    module, calls = experts("rowwise"), []
    of = StoredMatrices.of

    def fails(*args):
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return of(*args)

    monkeypatch.setattr(StoredMatrices, "of", fails)
    with pytest.raises(RuntimeError, match="storing the weight of .* failed"):
        tritonfp8.convert(nn.ModuleDict({"experts": module}), "rowwise", mode="inference")
    assert {type(p) for p in module.parameters()} == {nn.Parameter}


@each_recipe
def test_shards_are_whole_experts(name):
    weight = stored_and_plain(name)[0].gate_up_proj.detach()
    first, second = torch.split(weight, 3)
    assert type(first) is type(second) is MatricesShard
    assert (len(first), len(second)) == (3, 1)
    joined = [torch.cat(each) for each in zip(first.as_bytes(), second.as_bytes(), strict=True)]
    assert_bitwise_equal(list(weight.of_bytes(*joined)), list(weight._both()))
    assert_bitwise_equal([torch.cat([first.dequantize(), second.dequantize()])], [weight.dequantize()])
    assert weight.new_zeros((0, *weight.shape[1:])).dequantize().shape == (0, *weight.shape[1:])
    for dim in (1, 2):
        with pytest.raises(NotImplementedError, match="are sharded over experts only"):
            torch.split(weight, 16, dim)
    with pytest.raises(NotImplementedError, match="cut between experts only"):
        first[:, 3:8]
