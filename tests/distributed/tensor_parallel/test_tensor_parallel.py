"""A Llama under tensor and sequence parallelism: the losses of one process."""

import pytest
import torch
from cases import QUANTIZED, llama, tokens, with_head
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module
from tp_cases import FLOAT8, PLAIN, R, whole

import tritonfp8
from tritonfp8 import recipes
from tritonfp8.distributed import PrepareFloat8ModuleInput
from tritonfp8.specs.testing import assert_bitwise_equal

# Not with the other tests of several processes: it has its own, and they would wait for it on a machine of two cores.
pytestmark = [pytest.mark.xdist_group("tensor parallel"), pytest.mark.one_in(5)]

NAMES = recipes.names()


def llama_plan(layers, styles, local, sequence):
    """The plan of torch's tutorial for a Llama. Attention reads local heads, so projections return local tensors."""
    colwise, rowwise, prepare = styles
    plan = {"lm_head": colwise(input_layouts=Shard(1) if sequence else R, output_layouts=R)}
    if sequence:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=R, output_layouts=Shard(1))
        plan["model.norm"] = SequenceParallel()
    for i in range(layers):
        at = f"model.layers.{i}"
        if sequence:
            plan[f"{at}.input_layernorm"] = SequenceParallel()
            plan[f"{at}.post_attention_layernorm"] = SequenceParallel()
            plan[f"{at}.self_attn"] = prepare(
                input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": R}
            )
            plan[f"{at}.mlp"] = prepare(input_layouts=(Shard(1),), desired_input_layouts=(R,))
        output = {"output_layouts": Shard(1)} if sequence else {}
        for name in ("q_proj", "k_proj", "v_proj"):
            plan[f"{at}.self_attn.{name}"] = colwise()
        plan[f"{at}.self_attn.o_proj"] = rowwise(**output)
        for name in ("gate_proj", "up_proj"):
            plan[f"{at}.mlp.{name}"] = colwise(use_local_output=local)
        plan[f"{at}.mlp.down_proj"] = rowwise(**output)
    return plan


def losses(model, steps, device, call=None):
    # Few tokens are noisy: in one process with tensorwise, weights that differ by 2^-22 change losses of 28 tokens by
    # up to 2e-3.
    # foreach=False: torch's foreach ops do not mix DTensors with plain tensors, such as the norms here.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    found = []
    for step in range(steps):
        ids = tokens(batch=32, length=32, seed=step, device=device)
        positions = torch.arange(32, device=device)[None]
        # With sequence parallelism the model sees only this rank's tokens, and would make a mask of that size.
        causal = torch.ones(32, 32, dtype=torch.bool, device=device).tril()[None, None]
        inputs = {"input_ids": ids, "labels": ids, "position_ids": positions, "attention_mask": causal}
        loss = whole((model if call is None else call)(**inputs, use_cache=False).loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


_runs = {}


def longest_run(key, steps, run):
    """The first losses of the longest run so far in this process."""
    if len(_runs.get(key, [])) < steps:
        _runs[key] = run()
    return _runs[key][:steps]


def converted_llama(name, heads, layers, device):
    sizes = {"hidden_size": 96, "intermediate_size": 171, "num_attention_heads": 6} if heads == 3 else {}
    model = llama(**{"num_key_value_heads": heads, "num_hidden_layers": layers, **sizes}).to(device)
    tritonfp8.convert(model, with_head(name))
    return model


def sharded_losses(mesh, name, local, float8, sequence, compiled=False, steps=2, layers=1):
    """Losses of a Llama sharded over all ranks."""

    def run():
        model = converted_llama(name, mesh.size(), layers, mesh.device_type)
        styles = (*FLOAT8, PrepareFloat8ModuleInput) if float8 else (*PLAIN, PrepareModuleInput)
        parallelize_module(model, mesh, llama_plan(layers, styles, local, sequence))
        return losses(model, steps, mesh.device_type, torch.compile(model, backend="aot_eager") if compiled else None)

    return longest_run((name, local, float8, sequence, compiled, mesh.size(), layers), steps, run)


def llama_losses(mesh, name, local, float8, sequence, compiled=False, steps=10, layers=1):
    """Losses of a Llama in one process, however it is sharded, and sharded over all ranks."""
    together = sharded_losses(mesh, name, local, float8, sequence, compiled, steps, layers)

    def run():
        return losses(converted_llama(name, mesh.size(), layers, mesh.device_type), steps, mesh.device_type)

    # Only rank 0 computes this, because the ranks share the machine's cores.
    alone = [longest_run((name, mesh.size(), layers), steps, run) if mesh.get_local_rank() == 0 else None]
    torch.distributed.broadcast_object_list(alone, src=0, group=mesh.get_group())
    return alone[0], together


# use_local_output, the FP8 styles, sequence parallelism
LLAMAS = {
    "float8, sequence": (False, True, True),
    "plain": (True, False, False),
    "plain DTensor outputs": (False, False, False),
    "plain, sequence": (True, False, True),
}


# One Llama of each recipe takes ten steps, as losses go NaN after some. The others compare two: the second is the first
# on weights that changed. Most have one layer, whose input and output are placed as a second layer's.
STEPS, FEW_STEPS = 10, 2


DEEP = ("rowwise", "blockwise")


def check_losses(ranks, world, name, llama, steps=FEW_STEPS, compiled=False, layers=1, **options):
    for alone, together in ranks.run(world, llama_losses, name, *LLAMAS[llama], compiled, steps, layers, **options):
        assert len(together) == steps
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-3
        assert alone[-1] != alone[0]


@pytest.mark.parametrize("name", NAMES)
def test_losses_do_not_go_nan_and_are_those_of_one_process(ranks, name):
    check_losses(ranks, 2, name, "float8, sequence", STEPS, layers=2 if name in DEEP else 1)


# Where outputs are DTensors, three ranks below have each recipe. Of local outputs two kinds of scales are enough.
FEW = [("rowwise", "plain"), ("blockwise", "plain"), ("bf16", "plain DTensor outputs")]


@pytest.mark.parametrize(("name", "llama"), [*((name, "plain, sequence") for name in NAMES), *FEW])
def test_losses_of_other_styles_are_those_of_one_process(ranks, name, llama):
    check_losses(ranks, 2, name, llama)


# Of three ranks the middle one's features of the MLP begin inside a block. Four divide as two do.
MORE_RANKS = [
    *((3, "plain DTensor outputs", name) for name in QUANTIZED),
    *((4, "float8, sequence", name) for name in DEEP),
]


@pytest.mark.parametrize(("world", "llama", "name"), MORE_RANKS)
def test_losses_over_more_ranks_are_those_of_one_process(ranks, world, name, llama):
    check_losses(ranks, world, name, llama)


@pytest.mark.parametrize("name", NAMES)
def test_losses_of_sequence_parallelism_are_the_same_bits_by_whichever_styles(ranks, name):
    """What is gathered in 8 bits are the bytes that would be cast after the gather."""
    styles = (LLAMAS[llama] for llama in ("float8, sequence", "plain, sequence"))
    float8, plain = (ranks.run(2, sharded_losses, name, *each) for each in styles)
    assert float8 == plain


# Recipes differ in the ops of a layer: test_modules.py compares the compiled layer of each with the eager one, bit by
# bit.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["rowwise"])
def test_compiled_llama_trains_as_one_process(ranks, name):
    check_losses(ranks, 2, name, "float8, sequence", compiled=True, timeout=240)


def test_equal_results_of_all_ranks(ranks):
    first, second = ranks.run(2, llama_losses, "rowwise", *LLAMAS["plain"], False, FEW_STEPS)
    assert_bitwise_equal([torch.tensor(first[1])], [torch.tensor(second[1])])


@pytest.mark.multigpu
@pytest.mark.parametrize("llama", LLAMAS)
@pytest.mark.parametrize("name", NAMES)
def test_llama_trains_on_gpus_as_on_one(gpus, name, llama):
    for alone, together in gpus.run(2, llama_losses, name, *LLAMAS[llama], True, FEW_STEPS, timeout=240):
        assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-3
