"""FSDP2 gathers the weights of experts in 8 bits: losses and weights have the bits of a gather in high precision."""

import contextlib
import copy
import functools
import warnings
from dataclasses import dataclass, replace

import mixtures
import pytest
import torch
from cases import QUANTIZED
from fsdp_cases import same_as_without, step
from raised import raised
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather
from tritonfp8.distributed.fsdp.byte_layout import MatricesLayout
from tritonfp8.distributed.fsdp.gathered_weight import GatheredWeight
from tritonfp8.distributed.fsdp.orientations import weight_orientations

pytestmark = [pytest.mark.xdist_group("ranks"), pytest.mark.one_in(4)]
HIDDEN, INSIDE, TOP_K = 64, 48, 2


@dataclass(frozen=True)
class Setup:
    """How the model is sharded and run."""

    recipe: str = "rowwise"
    experts: int = 8
    reshard: bool | int = True
    recompute: bool = False
    compiled: bool = False
    micro_batches: int = 1
    param_dtype: torch.dtype | None = torch.bfloat16
    autocast: bool = False
    family: str | None = None
    shard_dim: int | None = None


class Block(nn.Module):
    """A linear layer, and experts with a router."""

    def __init__(self, setup):
        super().__init__()
        self.first, self.router = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, setup.experts)
        self.experts = tritonfp8.Float8Experts(setup.experts, HIDDEN, INSIDE, recipe=setup.recipe)

    def forward(self, x):
        h = torch.relu(self.first(x))
        weights, index = self.router(h).float().softmax(1).topk(TOP_K)
        return x + self.experts(h, index, weights.to(h.dtype))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self, setup):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(Block(setup) for _ in range(2)), nn.Linear(HIDDEN, 16)
        self.recompute = setup.recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.last(x)


def build(mesh, setup, enabled, cast="param_dtype"):
    """The sharded model: of this file, or a mixture of transformers."""
    torch.manual_seed(0)
    if setup.family is None:
        model = Model(setup)
        blocks = model.blocks
        tritonfp8.convert(model, setup.recipe, ["*.first"])
    else:
        model = mixtures.model_of(setup.family)
        blocks = model.model.layers
        tritonfp8.convert(model, setup.recipe)
    model.to(mesh.device_type)
    if enabled:
        names = enable_float8_all_gather(model, cast).converted
        assert any(name.endswith("experts") for name in names)
    if setup.compiled:
        backend = "aot_eager" if mesh.device_type == "cpu" else "inductor"
        for block in blocks:
            block.compile(backend=backend, fullgraph=True)
    options = {"mesh": mesh, "reshard_after_forward": setup.reshard}
    if setup.shard_dim is not None:
        options["shard_placement_fn"] = lambda p: Shard(setup.shard_dim) if p.ndim == 3 else None
    if setup.param_dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=setup.param_dtype)
    for module in (*blocks, model):
        fully_shard(module, **options)
    return model


def _loss(model, setup, mesh, number):
    generator = torch.Generator().manual_seed(100 * number + mesh.get_rank())
    if setup.family is not None:
        tokens = torch.randint(96, (2, 9), generator=generator).to(mesh.device_type)
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
    x, y = torch.randn(24, HIDDEN, generator=generator), torch.randint(16, (24,), generator=generator)
    return nn.functional.cross_entropy(model(x.to(mesh.device_type)).float(), y.to(mesh.device_type))


def full(model):
    return {name: p.full_tensor().clone() for name, p in model.named_parameters()}


def assert_all_moved(model, before):
    after = full(model)
    assert [name for name, p in after.items() if torch.equal(p, before[name])] == []
    return after


def train(mesh, setup, enabled):
    """Losses of two steps with a digest of the weights, which all move; gathered bytes of the second step."""
    model = build(mesh, setup, enabled)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before, losses = full(model), []
    for number in range(2):
        with count_collective_bytes() as traffic:
            for micro in range(setup.micro_batches):
                with torch.autocast(mesh.device_type, torch.bfloat16, enabled=setup.autocast):
                    loss = _loss(model, setup, mesh, 10 * number + micro)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    digest = [p.double().abs().sum().item() for p in assert_all_moved(model, before).values()]
    return (losses, digest), traffic.bytes["all_gather"]


# Plain FSDP2 gives the same bits with and without these, so one run of it stands for all of them.
LEAVE_FSDP2_ALONE = {"reshard": True, "recompute": False, "compiled": False}


@pytest.fixture(scope="module")
def off(ranks):
    """Runs without the 8-bit gather, each made once."""
    run = functools.cache(functools.partial(ranks.run, function=train, enabled=False))
    return lambda world, setup: run(world, setup=replace(setup, **LEAVE_FSDP2_ALONE))


def assert_same(ranks, off, world, setup):
    """Train with the 8-bit gather and without it; returns how many bytes each gathers in a step."""
    on, plain = ranks.run(world, train, setup, enabled=True), off(world, setup)
    assert [trained for trained, _ in on] == [trained for trained, _ in plain]
    return on[0][1], plain[0][1]


# The second step is the first that gathers what the optimizer changed. Whether weights stay gathered is decided before
# any recipe is read: compiled mxfp8 below, and experts on GPUs, have the other choice too.
@pytest.mark.parametrize(("recipe", "reshard"), [*((name, True) for name in QUANTIZED), ("rowwise", False)])
def test_losses_and_weights_have_the_same_bits(ranks, off, recipe, reshard):
    gathered, plain = assert_same(ranks, off, 2, Setup(recipe, reshard=reshard))
    if reshard:
        # Routers and the head are gathered as they are.
        assert gathered < 0.6 * plain


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": True},
        {"recompute": True, "recipe": "blockwise"},
        {"micro_batches": 2},
        {"micro_batches": 2, "reshard": False, "recipe": "mxfp8"},
        {"param_dtype": None},
        {"param_dtype": None, "autocast": True},
        {"family": "gpt_oss"},
        {"family": "gpt_oss", "recipe": "tensorwise", "compiled": True},
        {"family": "qwen3_moe", "recipe": "mxfp8", "recompute": True},
    ],
    ids=str,
)
def test_of_other_models_and_setups(ranks, off, options):
    assert_same(ranks, off, 2, Setup(**options))


@pytest.mark.parametrize(("world", "experts", "recipe"), [(2, 5, "rowwise"), (4, 5, "tensorwise"), (4, 3, "mxfp8")])
def test_experts_that_do_not_divide_and_ranks_without_one(ranks, off, world, experts, recipe):
    assert_same(ranks, off, world, Setup(recipe, experts))


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("rowwise", {}),
        ("rowwise_hp_grad_weight", {"recompute": True}),
        ("blockwise", {"recompute": True}),
        ("mxfp8", {"reshard": False}),
    ],
    ids=str,
)
def test_compiled_blocks(ranks, off, recipe, options):
    gathered, plain = assert_same(ranks, off, 2, Setup(recipe, compiled=True, **options))
    if not options:
        # Backward's operands are gathered in backward, not in forward as well.
        assert gathered < 0.6 * plain


@pytest.mark.parametrize("options", [{}, {"compiled": True}, {"family": "gpt_oss"}], ids=str)
@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_one_orientation_serves_both_passes_if_transposes_are_made_from_codes(ranks, off, recipe, options):
    codes = recipes.get(recipe, transposed_from="codes")
    gathered, plain = assert_same(ranks, off, 2, Setup(codes, reshard=False, **options))
    # The run without gathers twice, two bytes an element.
    assert gathered < 0.29 * plain


def act(action, model, setup, mesh, enabled):
    """What may happen between two steps."""
    swaps = {"swap": "mxfp8", "swap back": setup.recipe, "high precision": "bf16"}
    if action in swaps:
        tritonfp8.swap_recipe(model, swaps[action])
    elif action == "revert":
        tritonfp8.revert(model)
    elif action == "copy":
        copy.deepcopy(model.state_dict())
    elif action == "block alone":
        model.blocks[0](torch.ones(4, HIDDEN, device=mesh.device_type)).sum().backward()
    else:
        with {"inference": torch.inference_mode}.get(action, torch.no_grad)():
            _loss(model, setup, mesh, 99)
    if action == "once":
        # After an evaluation that left weights gathered; if in 8 bits, with weights quantized once.
        with tritonfp8.quantize_weights_once(model) if enabled else contextlib.nullcontext():
            for _ in range(2):
                _loss(model, setup, mesh, 97).backward()


def after_actions(mesh, setup, actions, enabled):
    """Losses of a step before each action and of one after all; every weight moves in each."""
    model = build(mesh, setup, enabled)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, before = [], full(model)
    for number, action in enumerate((*actions, None)):
        losses.append(step(_loss, optimizer, model, setup, mesh, number))
        before = assert_all_moved(model, before)
        if action is not None:
            act(action, model, setup, mesh, enabled)
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "actions",
    [
        ("swap", "swap back", "high precision", "swap"),
        ("revert",),
        ("no_grad", "inference", "block alone"),
        ("block alone", "copy", "once"),
    ],
    ids=str,
)
def test_between_steps(ranks, actions, reshard):
    same_as_without(ranks, 2, after_actions, Setup(reshard=reshard), actions)


def test_an_evaluation_where_a_rank_has_no_expert(ranks):
    same_as_without(ranks, 4, after_actions, Setup(experts=3), ("no_grad", "inference"))


def warned(mesh, setup):
    """The warnings of a step of a model whose experts cannot be gathered in 8 bits."""
    model = build(mesh, setup, True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            _loss(model, setup, mesh, 0).backward()
    return [str(each.message) for each in caught if "in 8 bits" in str(each.message)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shard_dim": 1}, "sharded along another dim than the expert dim"),
        ({"reshard": 2}, "resharded to fewer ranks after forward (reshard_after_forward=int)"),
    ],
    ids=str,
)
def test_a_way_of_sharding_that_is_not_served_is_told_once(ranks, off, options, reason):
    assert_same(ranks, off, 4, Setup(**options))
    for texts in ranks.run(4, warned, Setup(**options)):
        (text,) = texts
        names = ", ".join(f"blocks.{i}.experts.{name}" for name in ("gate_up_proj", "down_proj") for i in range(2))
        assert text == f"weights are gathered in high precision, not in 8 bits:\n  {names}: it is {reason}"


def loss_of_cast(mesh, cast):
    return _loss(build(mesh, Setup(), True, cast), Setup(), mesh, 0).item()


def test_float32_shards_can_be_quantized_as_they_are(ranks):
    losses = (ranks.run(2, loss_of_cast, cast) for cast in ("master", "param_dtype"))
    for quantized, rounded in zip(*losses, strict=True):
        assert quantized != rounded
        assert quantized == pytest.approx(rounded, rel=1e-2)


def errors(mesh):
    """The texts of errors."""
    setup = Setup()
    model = build(mesh, setup, True)
    found = [raised(lambda: enable_float8_all_gather(model))]
    experts = tritonfp8.Float8Experts(4, HIDDEN, INSIDE, recipe="rowwise")
    enable_float8_all_gather(experts)
    found.append(raised(lambda: enable_float8_all_gather(experts)))
    _loss(model, setup, mesh, 0).backward()
    model.blocks[0].experts.down_proj.data = model.blocks[1].experts.down_proj.detach().clone()
    found.append(raised(lambda: _loss(model, setup, mesh, 0)))
    model = build(mesh, setup, True)
    model.blocks[0].experts.register_forward_pre_hook(lambda module, args: module.down_proj.sum())
    found.append(raised(lambda: _loss(model, setup, mesh, 0)))
    return found


def test_errors(ranks):
    messages = (
        "ValueError: the weight of blocks.0.first is gathered in 8 bits already",
        "ValueError: the experts of the model are gathered in 8 bits already",
        "RuntimeError: the weight of blocks.0.experts.down_proj was assigned by param.data",
        "NotImplementedError: aten.sum.default needs the values of experts that FSDP gathered in 8 bits",
    )
    for texts in ranks.run(2, errors):
        for text, message in zip(texts, messages, strict=True):
            assert text.startswith(message), text


def test_operands_of_another_recipe_are_an_error():
    hp, rowwise = (recipes.get(name) for name in ("rowwise_hp_grad_weight", "rowwise"))
    layout = MatricesLayout(2, 32, 64, 1, weight_orientations(hp), together=True)
    sent = layout.pack(torch.randn(2, 32, 64), (0, 1))
    weight = GatheredWeight(layout.joined(sent, ()), None, layout, torch.float32)
    weight.operand(rowwise.output.rhs, False)
    with pytest.raises(ValueError, match="and their recipe reads .* transposed: swap recipes between steps"):
        weight.operand(rowwise.grad_input.rhs, True)


@pytest.mark.parametrize("recipe", ["bf16"])
def test_the_report_names_experts_in_high_precision(recipe):
    model = mixtures.model_of("mixtral")
    tritonfp8.convert(model, {"*.0.mlp.experts": recipe, "*": "rowwise"})
    report = enable_float8_all_gather(model)
    assert report.skipped["model.layers.0.mlp.experts"] == "experts whose recipe reads their weights in high precision"
    assert report.converted["model.layers.1.mlp.experts"] == recipes.get("rowwise")


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_bytes_of_each_pass(recipe):
    """Half of the bytes of bfloat16, and the scales; a rank sends as many whatever it has."""
    orientations = weight_orientations(recipes.get(recipe))
    layout = MatricesLayout(6, 512, 384, 4, orientations, together=False)
    for rank_experts in (2, 1, 0):
        shard = torch.randn(rank_experts, 512, 384)
        for i in range(len(orientations)):
            sent = layout.pack(shard, (i,))
            assert sum(x.numel() for x in sent) <= 0.52 * 2 * layout.shard_experts * 512 * 384
            assert [x.numel() for x in sent] == [2 * 512 * 384, layout.scales_size]


# On GPUs.


def assert_same_on_gpus(gpus, setup):
    on, off = (gpus.run(2, train, setup, enabled, timeout=300) for enabled in (True, False))
    assert [trained for trained, _ in on] == [trained for trained, _ in off]
    return on[0][1], off[0][1]


@pytest.mark.multigpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", QUANTIZED)
def test_on_gpus(gpus, recipe, compiled):
    for reshard in (True,) if compiled else (True, False):
        gathered, plain = assert_same_on_gpus(gpus, Setup(recipe, reshard=reshard, compiled=compiled))
        if reshard:
            assert gathered < 0.6 * plain


@pytest.mark.multigpu
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_mixtures_of_transformers_on_gpus(gpus, family):
    assert_same_on_gpus(gpus, Setup(family=family, recompute=family == "qwen3_moe"))
