"""A chain of ops by one plan: the bits of the ops, and memory that later steps share."""

import pytest
import torch
from cases import each_device, normal
from op_samples import chain_args

from tritonfp8 import ops, recipes, reference
from tritonfp8.launch import LAUNCHES, chains, executor
from tritonfp8.launch.plan import BUFFER_ALIGNMENT, Buffer, Launch, Plan, View, workspace
from tritonfp8.layers.linear import function
from tritonfp8.reference import Chain
from tritonfp8.specs.testing import assert_bitwise_equal, assert_matmul_close

RECIPES = ["rowwise", "tensorwise", "blockwise"]
M, N, K = 160, 96, 128


def layer_chains(name, device):
    """The text and tensors of the chain of forward, and of backward."""
    (text,) = recipes.get(name).args
    x, weight, grad = (
        normal(*shape, seed=i, dtype=torch.bfloat16).to(device) for i, shape in enumerate(((M, K), (N, K), (M, N)))
    )
    bias, both = normal(N, seed=3, dtype=torch.bfloat16).to(device), (True, True)
    forward, present = function._output_chain(text, both, x.dtype, (True, True, True, False, False))
    yield forward, [x, weight, bias]
    _, *saved = reference.chain(x, [weight, bias], forward)
    saved = iter(saved)
    qdata, scale, amax_t = (next(saved) if each else None for each in present[1:])
    tensors = [grad, weight, amax_t, qdata, scale]
    given = tuple(each is not None for each in tensors)
    backward, _ = function._gradient_chain(text, both, (x.dtype, x.dtype), True, given)
    yield backward, [each for each in tensors if each is not None]


def check(found, tensors, text):
    """Casts equal the casts of each op to the bit; on a GPU GEMMs, too, by the same kernels."""
    by_step = Chain.of(text).run(tensors, LAUNCHES.__getitem__)
    assert_bitwise_equal(found, by_step)
    for x, expected in zip(found, reference.chain(tensors[0], tensors[1:], text), strict=True):
        assert (x.shape, x.stride(), x.dtype) == (expected.shape, expected.stride(), expected.dtype)


@each_device
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_a_chain_gives_the_bits_of_its_ops(device, recipe, which):
    text, tensors = list(layer_chains(recipe, device))[which == "backward"]
    # The second call repeats the plan of the first; the third one is at other addresses.
    first, second = (LAUNCHES["chain"](tensors[0], tensors[1:], text) for _ in range(2))
    others = [x.clone() for x in tensors]
    third = LAUNCHES["chain"](others[0], others[1:], text)
    for found in (first, second, third):
        check(found, tensors, text)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_many_chains_in_a_row_share_memory_and_keep_their_bits(recipe):
    """Results are read while later chains take the memory that earlier ones gave back."""
    for text, tensors in layer_chains(recipe, "cuda"):
        expected = ops.CALLS.chain(tensors[0], tensors[1:], text)
        found = [ops.CALLS.chain(tensors[0], tensors[1:], text) for _ in range(50)]
        for each in found:
            assert_bitwise_equal(each, expected)


def test_a_step_without_a_plan_leaves_the_chain_without_one(monkeypatch):
    """Then each op runs as it does by itself; that there is no plan is known at the next call."""
    x = normal(64, 33, dtype=torch.bfloat16)
    x, others, text = chain_args(x, x[:40].contiguous())
    asked = []

    def no_plan(*args):
        asked.append(args)

    monkeypatch.setattr(executor, "_plans", {})
    monkeypatch.setattr(chains, "plan_chain", no_plan)
    for _ in range(2):
        found = LAUNCHES["chain"](x, others, text)
        assert_bitwise_equal(found[1:], reference.chain(x, others, text)[1:])
        assert_matmul_close(found[0], reference.chain(x, others, text)[0].float(), torch.bfloat16)
    assert len(asked) == 1


def test_a_text_is_read_as_it_was_written():
    text, _ = next(layer_chains("rowwise", "cpu"))
    assert Chain.of(text).text == text
    assert torch.bfloat16 in Chain.of(text).steps[-1].args


def test_only_calls_of_ops_by_position_are_recorded():
    spec = recipes.get("rowwise").output.lhs.args
    text, present = reference.recorded(lambda x, y: (None, ops.quantize(x, *spec)[1]), (True, False))
    assert (len(Chain.of(text).steps), Chain.of(text).outputs, present) == (1, (2,), (False, True))
    for function_ in (lambda x: [torch.neg(x)], lambda x: [ops.quantize(x, *spec, transpose=True)[0]]):
        with pytest.raises(AssertionError):
            reference.recorded(function_, (True,))


def launched(*slots):
    return Launch(None, 1, tuple(View(slot, (4,), (1,), torch.float32) for slot in slots), (), {}, {})


def planned(launches, outputs=(), size=100, zeroed=()):
    """A plan of one input and four buffers, which are slots 1 to 4."""
    buffers = tuple(Buffer((size * i,), (1,), torch.float32, i in zeroed) for i in range(1, 5))
    views = tuple(View(slot, (4,), (1,), torch.float32) for slot in outputs)
    return Plan(1, buffers, tuple(launched(*slots) for slots in launches), views)


def test_buffers_that_are_used_at_the_same_time_share_no_bytes():
    offsets, size = workspace(planned([(0, 1), (1, 2), (2, 3), (3, 4)], outputs=[4]))
    ends = {i: offset + 4 * 100 * (i + 1) for i, offset in offsets.items()}
    assert set(offsets) == {0, 1, 2}
    assert all(offset % BUFFER_ALIGNMENT == 0 for offset in offsets.values())
    assert ends[0] <= offsets[1] or ends[1] <= offsets[0]
    assert ends[1] <= offsets[2] or ends[2] <= offsets[1]
    # The third one has the bytes of the first, and more.
    assert offsets[0] == offsets[2] or offsets[2] >= ends[1]
    assert max(ends.values()) <= size


def test_a_buffer_takes_the_bytes_of_one_that_is_done():
    offsets, size = workspace(planned([(1,), (2,), (3,)], size=128))
    assert (offsets, size) == ({0: 0, 1: 0, 2: 0}, 3 * 512)


def test_what_is_returned_or_zeroed_has_a_tensor_of_its_own():
    assert workspace(planned([(1, 2, 3, 4)], outputs=[1, 2], zeroed=[3])) == ({3: 0}, 2048)
    assert workspace(planned([], outputs=[1])) == ({}, 0)
