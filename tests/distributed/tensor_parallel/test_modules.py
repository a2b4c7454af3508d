"""Modules in styles of tensor and of sequence parallelism: the results of one process, and no collective too many."""

import contextlib
import itertools

import pytest
import torch
from cases import QUANTIZED, normal
from raised import raised
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import SequenceParallel, loss_parallel, parallelize_module
from tp_cases import (
    FLOAT8,
    PLAIN,
    Mlp,
    R,
    Recorder,
    assert_same,
    converted_mlp,
    mlp_plan,
    on_mesh,
    results,
    sequence_plan_mlp,
    whole,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tritonfp8
from tritonfp8 import distributed, recipes
from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from tritonfp8.functional import linear
from tritonfp8.specs.testing import assert_bitwise_equal

pytestmark = [pytest.mark.xdist_group("tensor parallel"), pytest.mark.one_in(4)]

NAMES = recipes.names()


def check_mlp(mesh, local, first, styles, hidden=96):
    """Plain or FP8 styles on an MLP that is converted before or after sharding."""
    x = normal(2, 37, 64, seed=5).to(mesh.device_type)
    for name in NAMES:
        model = converted_mlp(mesh, name, mlp_plan(styles, use_local_output=local), first, hidden)
        assert_same(results(model, x), results(converted_mlp(mesh, name, hidden=hidden), x))


@pytest.mark.parametrize(("local", "first"), list(itertools.product([True, False], repeat=2)))
def test_plain_styles(ranks, local, first):
    ranks.run(2, check_mlp, local, first, PLAIN)


@pytest.mark.parametrize(("local", "first"), [(True, True), (False, True), (True, False)])
def test_float8_styles(ranks, local, first):
    ranks.run(2, check_mlp, local, first, FLOAT8)


def test_plain_styles_of_features_that_do_not_divide(ranks):
    ranks.run(3, check_mlp, False, True, PLAIN, 100)


@pytest.mark.multigpu
@pytest.mark.parametrize("local", [True, False])
def test_styles_on_gpus(gpus, local):
    gpus.run(2, check_mlp, local, True, FLOAT8, timeout=240)


def check_sequence_mlp_with_counts(mesh, counts):
    """Forward and backward with any token counts through colwise and rowwise layers, on plain tensors."""
    rank, x = mesh.get_local_rank(), normal(sum(counts), 64, seed=5)
    for name in NAMES:
        model = converted_mlp(mesh, name, sequence_plan_mlp())
        out, grad_x, *grads = results(converted_mlp(mesh, name), x)
        mine = x.split(counts)[rank].clone().requires_grad_()
        with distributed.token_counts(counts):
            found = model(mine)
        assert not isinstance(found, DTensor)
        found.backward(normal(sum(counts), 64, seed=9).split(counts)[rank])
        got = [found.detach(), mine.grad, *(p.grad.full_tensor() for p in model.parameters())]
        assert_same(got, [out.split(counts)[rank], grad_x.split(counts)[rank], *grads])


@pytest.mark.parametrize("counts", [(127, 129), (1, 192)], ids=str)
def test_module_of_tokens_in_any_numbers(ranks, counts):
    ranks.run(2, check_sequence_mlp_with_counts, counts)


def collectives_of_siblings(mesh, name):
    """Numbers of gathers of tokens in forward and scatters in backward of an MLP; its first layers share an input."""
    model = converted_mlp(mesh, name, sequence_plan_mlp())
    x = normal(33, 64).requires_grad_()
    with Recorder() as forward:
        out = model(x)
    with Recorder() as backward:
        out.backward(torch.ones_like(out))
    assert x.grad is not None
    # Scales are fewer than the 33 x 64 elements of the tokens of a rank.
    gathers = sum(op == "all_gather_into_tensor" and n == 33 * 64 for op, _, n in forward.sent)
    return [gathers, sum(op == "reduce_scatter_tensor" for op, *_ in backward.sent)]


@pytest.mark.parametrize("name", NAMES)
def test_siblings_gather_once_and_scatter_their_gradient_once(ranks, name):
    operands = 2 if name in ("rowwise", "blockwise", "mxfp8", "mxfp4_weights") else 1
    assert ranks.run(2, collectives_of_siblings, name) == [[operands, 1]] * 2


def compiled_module(model):
    """The compiled module, and the counter of its graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(lambda x: model(x), backend=counter, fullgraph=True), counter


class NormedMlp(nn.Module):
    """A norm written as in transformers: several ops, computed in float32."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.last = LlamaRMSNorm(64), Mlp(), nn.Linear(64, 96)

    def forward(self, x):
        return self.last(self.norm(x + self.mlp(self.norm(x))))


def scatters_after_norms(mesh, name, compile):
    """Number and bytes of reduce-scatters in a step of layers that read DTensors from norms."""
    model = NormedMlp().bfloat16()
    tritonfp8.convert(model, name)
    plan = {f"mlp.{at}".rstrip("."): style for at, style in sequence_plan_mlp().items()}
    plan |= {"norm": SequenceParallel(sequence_dim=0), "last": Float8ColwiseParallel(input_layouts=Shard(0))}
    plan["mlp.down"] = Float8RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(model, mesh, plan)
    call, counter = compiled_module(model) if compile else (model, None)

    def step(function):
        model.zero_grad()
        local = normal(33, 64, dtype=torch.bfloat16)
        x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False).requires_grad_()
        out = function(x)
        out.sum().backward()
        return [whole(t) for t in (out.detach(), *(p.grad for p in (x, *model.parameters())))]

    first = step(model)
    with distributed.count_collective_bytes() as traffic:
        assert_bitwise_equal(step(call), first)
    assert counter is None or counter.frame_count == 1
    return traffic.calls["reduce_scatter"], traffic.bytes["reduce_scatter"]


@pytest.mark.parametrize(("name", "compile"), [*((name, False) for name in NAMES), ("rowwise_hp_grad_weight", True)])
def test_gradients_of_what_a_norm_returns_are_scattered_once(ranks, name, compile):
    """In its dtype: the gradients of two siblings' input and of the head's input, and the MLP's output in forward.

    Compiled, it is one graph of the same bytes.
    """
    rows = 2 * 33
    assert ranks.run(2, scatters_after_norms, name, compile, timeout=150) == [(3, 3 * rows * 64 * 2)] * 2


def check_compiled_mlp(mesh, name, local, all_rows):
    """Compiles without graph breaks to the bytes of the eager model, for any numbers of rows. Returns the graphs."""
    model = converted_mlp(mesh, name, mlp_plan(PLAIN, use_local_output=local))
    compiled, counter = compiled_module(model)
    for rows in all_rows:
        x, found = normal(rows, 64, seed=rows), []
        for call in (model, compiled):
            model.zero_grad()
            leaf = x.clone().requires_grad_()
            out = whole(call(leaf))
            out.backward(normal(*out.shape, seed=9))
            found.append([out.detach(), leaf.grad, *(p.grad.full_tensor() for p in model.parameters())])
        assert_bitwise_equal(found[1], found[0])
    return counter.frame_count


# A compiled layer of tensor parallelism takes seconds, so each recipe and each kind of outputs is compiled once: local
# ones of "rowwise" in any number of tokens, outputs of sequence parallelism above and in a Llama elsewhere.
@pytest.mark.parametrize("name", ["tensorwise", "rowwise_hp_grad_weight", "blockwise", "mxfp8"])
def test_compiled_module_is_one_graph_of_the_same_bytes(ranks, name):
    assert ranks.run(2, check_compiled_mlp, name, False, [33], timeout=150) == [1, 1]


def test_compiled_module_takes_any_number_of_tokens(ranks):
    assert max(ranks.run(2, check_compiled_mlp, "rowwise", True, [34, 40, 51, 130], timeout=150)) <= 2


def check_loss_parallel(mesh, name, styles):
    """Cross entropy of a head with sharded outputs, and its gradients, as in one process."""
    target, found = torch.arange(24) % 64, []
    for sharded in (False, True):
        torch.manual_seed(0)
        head, x = nn.Linear(48, 64), normal(24, 48, seed=1).requires_grad_()
        tritonfp8.convert(head, name)
        if sharded:
            parallelize_module(head, mesh, styles[0](use_local_output=False))
        with loss_parallel() if sharded else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(head(x), target)
            loss.backward()
        found.append([whole(loss).detach(), x.grad, whole(head.weight.grad)])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("styles", [PLAIN, FLOAT8], ids=["plain", "float8"])
def test_loss_parallel(ranks, styles):
    for name in NAMES:
        ranks.run(2, check_loss_parallel, name, styles)


def scales_of_a_step(mesh, name, sequence):
    """Number of scales in an MLP's step on this rank. Asserts that all are scales of the same step in one process."""
    alone = converted_mlp(mesh, name)
    model = converted_mlp(mesh, name, sequence_plan_mlp() if sequence else mlp_plan(PLAIN))
    x, grad = normal(64, 64, seed=5), normal(64, 64, seed=6)
    mine = [t.chunk(2)[mesh.get_local_rank()] if sequence else t for t in (x, grad)]
    recorded = []
    for module, input, grad_output in ((alone, x, grad), (model, *mine)):
        with Recorder() as seen:
            module(input).backward(grad_output)
        recorded.append([scale.float() for _, out in seen.casts for scale in out[1::2]])
    wholes, parts = recorded
    gemms = (getattr(recipes.get(name), gemm) for gemm in recipes.GEMMS)
    specs = {spec for gemm in gemms for spec in (gemm.lhs, gemm.rhs) if spec is not None}
    # A shard that begins inside a block is padded with zeros, which have their own scale.
    nothing = {tritonfp8.quantize(torch.zeros(1, 1), spec).scale.float().item() for spec in specs}
    for part in parts:
        held = part[[not set(row.tolist()) <= nothing for row in part]]
        assert any(_is_part(held, whole) for whole in wholes), part.shape
        assert 2 * len(held) >= len(part)
    return len(parts)


def _is_part(part, whole):
    rows, cols = (w - p for w, p in zip(whole.shape, part.shape, strict=True))
    return any(
        torch.equal(part, whole[i : i + part.shape[0], j : j + part.shape[1]])
        for i in range(rows + 1)
        for j in range(cols + 1)
    )


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_scales_of_a_step_are_those_of_one_process(ranks, name, sequence):
    assert min(ranks.run(2, scales_of_a_step, name, sequence)) >= 6


def error_of(mesh, case):
    """Error message of a wrong call."""
    x, w = normal(8, 64), on_mesh(normal(32, 64), mesh, [Shard(0)])

    def layer(**options):
        return parallelize_module(nn.Linear(64, 32), mesh, Float8ColwiseParallel(**options))

    def nothing_inside():
        parallelize_module(Mlp(), mesh, PrepareFloat8ModuleInput(input_layouts=R, desired_input_layouts=R))(x)

    def chunks():
        rows = (3, 5)[mesh.get_local_rank()]
        x = DTensor.from_local(normal(rows, 64), mesh, [Shard(0)], run_check=False, shape=(8, 64), stride=(64, 1))
        linear(x, w)

    def counts():
        module = layer(input_layouts=Shard(0))
        tritonfp8.convert(module, "rowwise")
        with distributed.token_counts([3, 5]):
            module(x)

    calls = {
        "plain input": lambda: linear(x, w, None, "rowwise"),
        "plain bias": lambda: linear(on_mesh(x, mesh, [R]), w, normal(32), "rowwise"),
        "embedding": lambda: parallelize_module(nn.Embedding(4, 4), mesh, Float8ColwiseParallel()),
        "not converted": lambda: layer()(x),
        "nothing inside": nothing_inside,
        "chunks": chunks,
        "counts": counts,
        "features": lambda: linear(on_mesh(normal(8, 65), mesh, [Shard(1)]), on_mesh(normal(8, 64), mesh, [Shard(1)])),
    }
    return raised(calls[case])


@pytest.mark.parametrize(
    ("case", "error", "says"),
    [
        ("plain input", "TypeError", "ColwiseParallel"),
        ("plain bias", "TypeError", "as bias"),
        ("embedding", "TypeError", "got Embedding"),
        ("not converted", "TypeError", "tritonfp8.convert"),
        ("nothing inside", "TypeError", "tritonfp8.convert"),
        ("chunks", "ValueError", "token_counts"),
        ("counts", "ValueError", "give every rank the counts of all"),
        ("features", "ValueError", "input [..., K] and weight [N, K]"),
    ],
)
def test_wrong_use_says_the_right_one(ranks, case, error, says):
    for message in ranks.run(2, error_of, case):
        assert message.startswith(error)
        assert says in message


def test_prepare_float8_module_input_keeps_dtensors():
    with pytest.raises(ValueError, match="use_local_output must be False"):
        PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=R, use_local_output=True)
