"""Functions of each rank in the tests of sharded modules and models. Each returns plain data or raises."""

import torch
from cases import give_up, llama, normal, tokens, with_head
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from tp_cases import SAME_BUT_FOR_ORDER, R, Recorder, assert_same, device, mesh_of, on_mesh, tolerance
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import tritonfp8
from tritonfp8 import distributed, recipes
from tritonfp8.distributed import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from tritonfp8.functional import linear
from tritonfp8.specs.testing import assert_bitwise_equal, sqnr


class Mlp(nn.Module):
    def __init__(self, hidden=96, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.up = nn.Linear(64, hidden, bias=bias), nn.Linear(64, hidden, bias=bias)
        self.down = nn.Linear(hidden, 64, bias=bias)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def run_module(module, x):
    x = x.detach().requires_grad_()
    out = module(x)
    if isinstance(out, DTensor):
        out = out.full_tensor()
    out.backward(normal(*out.shape, seed=9).to(x.device))
    grads = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in module.named_parameters()}
    return out.detach(), grads, x.grad


def mlp_plan(colwise, rowwise, **options):
    return {"gate": colwise(**options), "up": colwise(**options), "down": rowwise()}


def check_mlp(names, local, first, float8, hidden=96):
    """Plain or FP8 styles on an MLP that is converted before or after sharding."""
    mesh = mesh_of([torch.distributed.get_world_size()])
    styles = (Float8ColwiseParallel, Float8RowwiseParallel) if float8 else (ColwiseParallel, RowwiseParallel)
    for name in names:
        reference, model = Mlp(hidden).to(device()), Mlp(hidden).to(device())
        tritonfp8.convert(reference, name)
        if first:
            tritonfp8.convert(model, name)
        parallelize_module(model, mesh, mlp_plan(*styles, use_local_output=local))
        if not first:
            tritonfp8.convert(model, name)
        x = normal(2, 37, 64, seed=5).to(device())
        out, grads, grad_x = run_module(model, x)
        wanted, wanted_grads, wanted_grad_x = run_module(reference, x)
        assert_same([out, grad_x], [wanted, wanted_grad_x], bitwise=False)
        for key in wanted_grads:
            assert sqnr(grads[key], wanted_grads[key]) > tolerance(), key


def check_compiled_mlp(name, local, all_rows):
    """Compiles without graph breaks to the bytes of the eager model, for any numbers of rows. Returns the graphs."""
    model = Mlp()
    tritonfp8.convert(model, name)
    parallelize_module(model, mesh_of([2]), mlp_plan(ColwiseParallel, RowwiseParallel, use_local_output=local))
    compiled, counter = compiled_module(model)
    for rows in all_rows:
        x = normal(rows, 64, seed=rows)
        model.zero_grad()
        eager = run_module(model, x)
        model.zero_grad()
        out, grads, grad_x = run_module_compiled(compiled, model, x)
        assert_bitwise_equal([out, grad_x, *grads.values()], [eager[0], eager[2], *eager[1].values()])
    assert len(all_rows) > 1 or counter.frame_count == 1
    return counter.frame_count


def compiled_module(model):
    """The compiled module, and the counter of its graphs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(lambda x: model(x), backend=counter, fullgraph=True), counter


def run_module_compiled(compiled, model, x):
    x = x.detach().requires_grad_()
    out = compiled(x)
    out.backward(normal(*out.shape, seed=9))
    return out.detach(), {n: p.grad.full_tensor() for n, p in model.named_parameters()}, x.grad


def sequence_plan_mlp():
    return {
        "": PrepareFloat8ModuleInput(input_layouts=Shard(0), desired_input_layouts=R),
        "gate": Float8ColwiseParallel(),
        "up": Float8ColwiseParallel(),
        "down": Float8RowwiseParallel(output_layouts=Shard(0)),
    }


class NormedMlp(nn.Module):
    """A norm written as in transformers: several ops, computed in float32."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp, self.last = LlamaRMSNorm(64), Mlp(), nn.Linear(64, 96)

    def forward(self, x):
        return self.last(self.norm(x + self.mlp(self.norm(x))))


def collectives_of_siblings(name):
    """Numbers of gathers in forward and scatters in backward of an MLP; its first layers share a sharded input."""
    mesh = mesh_of([2])
    model = Mlp()
    tritonfp8.convert(model, name)
    parallelize_module(model, mesh, sequence_plan_mlp())
    x = normal(33, 64).requires_grad_()
    with Recorder() as forward:
        out = model(x)
    with Recorder() as backward:
        out.backward(torch.ones_like(out))
    assert x.grad is not None
    passes = ((forward, "all_gather_into_tensor"), (backward, "reduce_scatter_tensor"))
    return [sum(op == wanted for op, *_ in seen.sent) for seen, wanted in passes]


def scatters_after_norms(name, compile):
    """Number and bytes of reduce-scatters in a step of layers that read DTensors from norms."""
    mesh = mesh_of([2])
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
        found = out.detach(), *(p.grad for p in (x, *model.parameters()))
        return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]

    first = step(model)
    with distributed.count_collective_bytes() as traffic:
        assert_bitwise_equal(step(call), first)
    assert counter is None or counter.frame_count == 1
    return traffic.calls["reduce_scatter"], traffic.bytes["reduce_scatter"]


def check_sequence_mlp_with_counts(names, counts):
    """Forward and backward with any token counts through colwise and rowwise layers, on plain tensors."""
    rank = torch.distributed.get_rank()
    mesh = mesh_of([len(counts)])
    for name in names:
        reference, model = Mlp(), Mlp()
        tritonfp8.convert(reference, name)
        tritonfp8.convert(model, name)
        parallelize_module(model, mesh, sequence_plan_mlp())
        x = normal(sum(counts), 64, seed=5)
        wanted, wanted_grads, wanted_grad_x = run_module(reference, x)
        mine = x.split(counts)[rank].clone().requires_grad_()
        with distributed.token_counts(counts):
            out = model(mine)
        assert not isinstance(out, DTensor)
        out.backward(normal(sum(counts), 64, seed=9).split(counts)[rank])
        got = [out.detach(), mine.grad, *(p.grad.full_tensor() for p in model.parameters())]
        wanted = [wanted.split(counts)[rank], wanted_grad_x.split(counts)[rank], *wanted_grads.values()]
        for a, e in zip(got, wanted, strict=True):
            assert a.shape == e.shape
            assert a.numel() == 0 or sqnr(a, e) > SAME_BUT_FOR_ORDER, sqnr(a, e)


def fail_on_rank_1(mesh, how):
    """A step of sequence parallelism in which rank 1 fails or skips a layer."""
    model = Mlp()
    tritonfp8.convert(model, "rowwise")
    parallelize_module(model, mesh, sequence_plan_mlp())
    x = normal(32, 64).chunk(2)[mesh.get_local_rank()].requires_grad_()
    model(x).sum().backward()
    if mesh.get_local_rank() == 1:
        give_up(how)
        if how == "skip":
            return 0.0
    return model(x).sum().item()


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


def losses(model, steps, call=None):
    # Few tokens are noisy: in one process with tensorwise, weights that differ by 2^-22 change losses of 28 tokens by
    # up to 2e-3.
    # foreach=False: torch's foreach ops do not mix DTensors with plain tensors, such as the norms here.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=False)
    found = []
    for step in range(steps):
        ids = tokens(batch=32, length=32, seed=step, device=device())
        positions = torch.arange(32, device=device())[None]
        # With sequence parallelism the model sees only this rank's tokens, and would make a mask of that size.
        causal = torch.ones(32, 32, dtype=torch.bool, device=device()).tril()[None, None]
        inputs = {"input_ids": ids, "labels": ids, "position_ids": positions, "attention_mask": causal}
        loss = (model if call is None else call)(**inputs, use_cache=False).loss
        if isinstance(loss, DTensor):
            loss = loss.full_tensor()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


_alone = {}


def losses_alone(name, heads, layers, steps):
    """Losses of the Llama in one process, however it is sharded: the first steps of the longest run so far."""
    found = _alone.get((name, heads, layers), [])
    if len(found) < steps:
        found = _alone[name, heads, layers] = losses(converted_llama(name, heads, layers), steps)
    return found[:steps]


def converted_llama(name, heads, layers):
    sizes = {"hidden_size": 96, "intermediate_size": 171, "num_attention_heads": 6} if heads == 3 else {}
    model = llama(**{"num_key_value_heads": heads, "num_hidden_layers": layers, **sizes}).to(device())
    tritonfp8.convert(model, with_head(name))
    return model


def llama_losses(name, local, float8, sequence, compiled=False, steps=10, layers=1):
    """Losses of a Llama in one process, and sharded over all ranks."""
    heads = torch.distributed.get_world_size()
    together = sharded_losses(name, local, float8, sequence, compiled, steps, heads, layers)
    # Only rank 0 computes this, because the ranks share the machine's cores.
    alone = [losses_alone(name, heads, layers, steps) if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(alone, src=0)
    return alone[0], together


_together = {}


def sharded_losses(name, local, float8, sequence, compiled=False, steps=2, heads=2, layers=1):
    """Losses of a Llama sharded over all ranks: the first steps of the longest run so far in these processes."""
    run = name, local, float8, sequence, compiled, heads, layers
    found = _together.get(run, [])
    if len(found) < steps:
        found = _together[run] = _sharded_losses(*run, steps)
    return found[:steps]


def _sharded_losses(name, local, float8, sequence, compiled, heads, layers, steps):
    model = converted_llama(name, heads, layers)
    fp8 = (Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput)
    styles = fp8 if float8 else (ColwiseParallel, RowwiseParallel, PrepareModuleInput)
    mesh = mesh_of([torch.distributed.get_world_size()])
    parallelize_module(model, mesh, llama_plan(layers, styles, local, sequence))
    return losses(model, steps, torch.compile(model, backend="aot_eager") if compiled else None)


def check_loss_parallel(name, float8):
    """Cross entropy of a head with sharded outputs, and its gradients, equal those of one process."""
    from torch.distributed.tensor.parallel import loss_parallel

    style = Float8ColwiseParallel if float8 else ColwiseParallel
    target, found = torch.arange(24) % 64, []
    for sharded in (False, True):
        torch.manual_seed(0)
        head, x = nn.Linear(48, 64), normal(24, 48, seed=1).requires_grad_()
        tritonfp8.convert(head, name)
        if sharded:
            parallelize_module(head, mesh_of([2]), style(use_local_output=False))
            with loss_parallel():
                loss = nn.functional.cross_entropy(head(x), target)
                loss.backward()
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            found.append((loss.detach(), x.grad, head.weight.grad.full_tensor()))
        else:
            loss = nn.functional.cross_entropy(head(x), target)
            loss.backward()
            found.append((loss.detach(), x.grad, head.weight.grad))
    assert_same(found[1], found[0], bitwise=False)


def scales_of_a_step(name, sequence):
    """Number of scales in an MLP's step on this rank. Asserts that all are scales of the same step in one process."""
    alone, model = Mlp(), Mlp()
    for module in (alone, model):
        tritonfp8.convert(module, name)
    plan = sequence_plan_mlp() if sequence else mlp_plan(ColwiseParallel, RowwiseParallel)
    parallelize_module(model, mesh_of([2]), plan)
    x, rank = normal(64, 64, seed=5), torch.distributed.get_rank()
    recorded = []
    for module, input in ((alone, x), (model, x.chunk(2)[rank] if sequence else x)):
        with Recorder() as seen:
            out = module(input)
            out.backward(
                normal(64, 64, seed=6).chunk(2)[rank] if sequence and module is model else normal(64, 64, seed=6)
            )
        recorded.append([scale.float() for _, out in seen.casts for scale in out[1::2]])
    wholes, parts = recorded
    # A shard that begins inside a block is padded with zeros, which have their own scale.
    nothing = {tritonfp8.quantize(torch.zeros(1, 1), spec).scale.float().item() for spec in specs_of(name)}
    for part in parts:
        held = part[[not set(row.tolist()) <= nothing for row in part]]
        assert any(_is_part(held, whole) for whole in wholes), part.shape
        assert 2 * len(held) >= len(part)
    return len(parts)


def specs_of(name):
    gemms = (getattr(recipes.get(name), gemm) for gemm in recipes.GEMMS)
    return {spec for gemm in gemms for spec in (gemm.lhs, gemm.rhs) if spec is not None}


def _is_part(part, whole):
    rows, cols = (w - p for w, p in zip(whole.shape, part.shape, strict=True))
    return any(
        torch.equal(part, whole[i : i + part.shape[0], j : j + part.shape[1]])
        for i in range(rows + 1)
        for j in range(cols + 1)
    )


def error_of(case):
    """Error message of a wrong call."""
    mesh = mesh_of([2])
    x, w = normal(8, 64), on_mesh(normal(32, 64), mesh, [Shard(0)])

    def not_converted():
        module = parallelize_module(nn.Linear(64, 32), mesh, Float8ColwiseParallel())
        module(x)

    def nothing_inside():
        parallelize_module(Mlp(), mesh, PrepareFloat8ModuleInput(input_layouts=R, desired_input_layouts=R))(x)

    def chunks():
        rows = (3, 5)[mesh.get_local_rank()]
        x = DTensor.from_local(normal(rows, 64), mesh, [Shard(0)], run_check=False, shape=(8, 64), stride=(64, 1))
        linear(x, w)

    def counts():
        module = parallelize_module(nn.Linear(64, 32), mesh, Float8ColwiseParallel(input_layouts=Shard(0)))
        tritonfp8.convert(module, "rowwise")
        with distributed.token_counts([3, 5]):
            module(x)

    calls = {
        "plain input": lambda: linear(x, w, None, "rowwise"),
        "plain bias": lambda: linear(on_mesh(x, mesh, [R]), w, normal(32), "rowwise"),
        "embedding": lambda: parallelize_module(nn.Embedding(4, 4), mesh, Float8ColwiseParallel()),
        "not converted": not_converted,
        "nothing inside": nothing_inside,
        "chunks": chunks,
        "counts": counts,
        "features": lambda: linear(on_mesh(normal(8, 65), mesh, [Shard(1)]), on_mesh(normal(8, 64), mesh, [Shard(1)])),
    }
    try:
        calls[case]()
    except (TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return None
