"""A rollout of a model that FSDP2 shards: each rank has the whole model, gathered as forward gathers it."""

import peft
import pytest
import torch
from checkpoints import are_equal
from raised import raised
from rollout_models import (
    IDS,
    MASK,
    OPTIONS,
    RECIPES,
    addresses_of,
    bits_of,
    exact_trainer,
    plain,
    step,
    trainer,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import tritonfp8
from tritonfp8.distributed import Float8ColwiseParallel, count_collective_bytes, enable_float8_all_gather
from tritonfp8.rollout import Rollout, check, log_probs

pytestmark = pytest.mark.xdist_group("ranks")
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(model, mesh, policy=BFLOAT16):
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def whole_copy(sharded, recipe, kind):
    """A model in bfloat16 that is not sharded, with the weights of a sharded one."""
    values = {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in sharded.state_dict().items()}
    model = exact_trainer(kind, recipe)
    model.load_state_dict(values)
    return model


def trains(mesh, recipe, kind, gathers):
    model = exact_trainer(kind, recipe, torch.float32)
    if gathers:
        enable_float8_all_gather(model, "param_dtype")
    rollout = Rollout(shard(model, mesh))
    assert not any(isinstance(p, DTensor) for p in rollout.model.parameters())
    assert all(p.dtype == torch.bfloat16 for p in rollout.model.parameters())
    places = addresses_of(rollout)
    for _ in range(2):
        step(model, 0.1)
        # The last layers that forward gathered are whole still.
        assert len(rollout.changed()) == len(rollout.own)
        rollout.refresh()
        assert rollout.changed() == []
        expected = Rollout(whole_copy(model, recipe, kind))
        codes = bits_of(expected)
        assert codes
        assert are_equal({name: x for name, x in bits_of(rollout).items() if name in codes}, codes)
        others = dict(expected.model.named_parameters())
        assert all(torch.equal(x, others[n]) for n, x in rollout.model.named_parameters() if x.ndim == 1)
        found = check(model, rollout, IDS, MASK, **OPTIONS)
        assert (found.max_difference, found.module, found.codes) == (0, None, ())
        theirs = expected.generate(IDS, MASK, **OPTIONS)
        assert all(torch.equal(x, y) for x, y in zip(found.generated, theirs, strict=True))
    assert addresses_of(rollout) == places
    log_probs(model, found.generated.sequences, found.generated.attention_mask, 6).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_rank_has_the_codes_of_the_whole_model(ranks, recipe, gathers):
    ranks.run(2, trains, recipe, "qwen3", gathers)


@pytest.mark.parametrize("gathers", [False, True])
def test_experts(ranks, gathers):
    ranks.run(2, trains, "blockwise", "moe", gathers)


def stored(mesh):
    """Weights that train in 8 bits are gathered as codes."""
    model = plain(dtype=torch.float32)
    tritonfp8.convert(model, "rowwise", weight_storage="quantized", batch_invariant=True)
    rollout = Rollout(shard(model, mesh))
    before, optimizer = bits_of(rollout), tritonfp8.optim.AdamW(model.parameters(), lr=0.1)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="weights changed since refresh"):
        rollout.generate(IDS, **OPTIONS)
    rollout.refresh()
    assert not are_equal(bits_of(rollout), before)
    with torch.no_grad():
        assert torch.equal(rollout.model(IDS).logits, model(IDS).logits)


def test_weights_that_are_stored_in_8_bits(ranks):
    ranks.run(2, stored)


def adapted(mesh):
    """The embedding, which is tied to the head, is gathered by the module that peft puts around the model."""
    model = peft.get_peft_model(
        trainer(dtype=torch.float32, tie_word_embeddings=True),
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False),
    )
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=BFLOAT16)
    fully_shard(model, mesh=mesh, mp_policy=BFLOAT16)
    rollout = Rollout(model)
    assert rollout.model.lm_head.weight is rollout.model.model.embed_tokens.weight
    step(model)
    assert any("lora_A" in name for name in rollout.changed())
    rollout.refresh()
    with torch.no_grad():
        assert torch.equal(rollout.model(IDS).logits, model.eval()(IDS).logits)
    found = check(model, rollout, IDS, MASK, **OPTIONS)
    assert found.max_difference < 0.1
    assert found.codes == ()


def test_adapters(ranks):
    ranks.run(2, adapted)


def counted(mesh, gathers):
    model = exact_trainer(dtype=torch.float32)
    if gathers:
        enable_float8_all_gather(model, "param_dtype")
    rollout = Rollout(shard(model, mesh))
    # The first forward has FSDP2 gather 8 bits.
    step(model)
    with count_collective_bytes() as once:
        rollout.refresh()
    with count_collective_bytes() as none:
        rollout.generate(IDS, **OPTIONS)
    # Nor do ranks wait for each other at each token.
    assert not none.calls
    return sum(once.bytes.values())


def test_a_refresh_gathers_8_bits_where_forward_does(ranks):
    (plain_bytes, _), (bytes_in_8_bits, _) = (ranks.run(2, counted, gathers) for gathers in (False, True))
    # The embedding and the norms stay in bfloat16.
    assert bytes_in_8_bits < 0.6 * plain_bytes


def finds(mesh):
    """Every rank takes part, also where only one sees a difference."""
    model = exact_trainer(dtype=torch.float32)
    rollout = Rollout(shard(model, mesh))
    if mesh.get_local_rank() == 1:
        weight = next(each for each in rollout.own if each.name == "model.layers.1.mlp.up_proj.weight")
        weight.tensor._qdata.view(torch.uint8)[:64] = 0
    found = check(model, rollout, IDS, MASK, **OPTIONS)
    return found.max_difference > 0, found.module, found.codes


def test_one_rank_has_other_codes(ranks):
    first, second = ranks.run(2, finds)
    assert first == (False, None, ())
    assert second == (True, "model.layers.1.mlp.up_proj", ("model.layers.1.mlp.up_proj.weight",))


def refused(mesh):
    model = exact_trainer()
    plan = {"model.layers.0.mlp.up_proj": Float8ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    return raised(lambda: Rollout(model))


def test_tensor_parallelism_is_refused(ranks):
    for message in ranks.run(2, refused):
        assert "whole or sharded by FSDP2; model.layers.0.mlp.up_proj.weight is sharded, and not by FSDP2" in message
