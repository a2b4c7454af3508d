"""What equal bits in training and in generation cost: ``python -m bench.inference.rollout``.

attention   forward, and forward with backward, over the fastest attention of torch
step        forward and backward of compiled layers of Llama 8B, exact over not exact
decode      time of a token by calls of generate, over bf16 as transformers decodes it
graph       time of a token behind a context, as one CUDA graph, over bf16 of transformers in the same
refresh     new codes from the weights that train, over a copy of as many codes
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import tritonfp8
from bench.contest.machine import results_folder, write_results
from tritonfp8 import ops
from tritonfp8.advice import captured
from tritonfp8.rollout import Rollout, make_exact
from tritonfp8.training import timers

Step = Callable[[], Any]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
RECIPE, ROUNDS = "rowwise", 5
EXACT_CODE = {"emulate_precision_casts": True}


class Sizes(NamedTuple):
    """Sizes of models and inputs.

    Attributes:
        tokens: batches and lengths of training.
        sequences: how many are decoded at a time.
        new: tokens that a long generation has more than a short one.
        context: tokens that a token of a graph reads.
        heads: of queries, of keys, and elements of a head.
        ffn, layers: of the model.
    """

    tokens: tuple[tuple[int, int], ...] = ((4, 4096), (1, 16384))
    sequences: tuple[int, ...] = (1, 8, 64)
    new: int = 64
    context: int = 2048
    heads: tuple[int, int, int] = (32, 8, 128)
    ffn: int = 14336
    layers: int = 4


SMOKE = Sizes(((1, 128),), (1,), 2, 16, (4, 2, 16), 64, 1)


def seconds(steps: list[Step], device: torch.device) -> list[float]:
    """The median time of each; they take turns."""
    found: list[list[float]] = [[] for _ in steps]
    for step in steps:
        for _ in range(3):
            step()
    for _ in range(ROUNDS):
        for step, times in zip(steps, found, strict=True):
            timers.synchronize(device)
            began = time.perf_counter()
            for _ in range(5):
                step()
            timers.synchronize(device)
            times.append((time.perf_counter() - began) / 5)
    return [statistics.median(times) for times in found]


def wall(call: Step, device: torch.device) -> float:
    """Seconds of a call, until the device is done."""
    timers.synchronize(device)
    began = time.perf_counter()
    call()
    timers.synchronize(device)
    return time.perf_counter() - began


def model(sizes: Sizes, device: torch.device) -> Any:
    """Layers of Llama 8B in bf16, with a small vocabulary."""
    import transformers

    heads, kv_heads, d = sizes.heads
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=heads * d, intermediate_size=sizes.ffn, num_hidden_layers=sizes.layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=d, vocab_size=1024, max_position_embeddings=32768, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    with device:
        return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def training_step(made: Any, x: Tensor, options: dict[str, bool]) -> Step:
    """Forward and backward of the layers of a model, which are compiled; ``options`` are Inductor's."""
    compiler: dict[str, Any] = {"backend": "inductor", "options": options} if x.is_cuda else {"backend": "eager"}
    for layer in made.model.layers:
        layer.compile(fullgraph=True, dynamic=False, **compiler)

    def run() -> None:
        made.model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()
        made.zero_grad()

    return run


def attention(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of attention: seconds of forward and of both, by contender."""
    heads, kv_heads, d = sizes.heads
    for batch, length in sizes.tokens:
        given = [
            torch.randn(batch, length, n, d, device=device, dtype=torch.bfloat16).transpose(1, 2)
            for n in (heads, kv_heads, kv_heads)
        ]
        grad = torch.randn(batch, length, heads, d, device=device, dtype=torch.bfloat16)
        leaves = [x.detach().requires_grad_() for x in given]

        def exact(given: list[Tensor] = given) -> Any:
            return ops.exact_attention(*given, d**-0.5)

        def exact_both(given: list[Tensor] = given, grad: Tensor = grad) -> None:
            ops.exact_attention_backward(grad, *given, *exact(given), d**-0.5)

        steps = {"exact": (exact, exact_both)}
        for name, backend in BACKENDS.items() if device.type == "cuda" else ():

            def forward(backend: SDPBackend = backend, given: list[Tensor] = given) -> Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)

            def both(forward: Any = forward, leaves: list[Tensor] = leaves, grad: Tensor = grad) -> None:
                forward(given=leaves).backward(grad.transpose(1, 2))

            steps[name] = (forward, both)
        times = seconds([step for pair in steps.values() for step in pair], device)
        for i, name in enumerate(steps):
            what = {"tokens": f"{batch} x {length}", "contender": name}
            yield {"kind": "attention", **what, "forward": times[2 * i], "both": times[2 * i + 1]}


def step(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of a training step of layers, by contender."""
    batch, length = sizes.tokens[0]
    steps: dict[str, Step] = {}
    hidden = sizes.heads[0] * sizes.heads[2]
    x = torch.randn(batch, length, hidden, device=device, dtype=torch.bfloat16)
    for name in ("not exact", "batch invariant", "exact"):
        made = model(sizes, device)
        tritonfp8.convert(
            made, RECIPE, filter=lambda module, name: "lm_head" not in name, batch_invariant=name != "not exact"
        )
        if name == "exact":
            make_exact(made)
        steps[name] = training_step(made, x, EXACT_CODE if name == "exact" else {})
    for name, found in zip(steps, seconds(list(steps.values()), device), strict=True):
        yield {"kind": "step", "tokens": f"{batch} x {length}", "contender": name, "seconds": found}


def decode(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of a decoded token, by contender: the time that more tokens take."""
    made = model(sizes, device)
    converted = model(sizes, device)
    tritonfp8.convert(converted, RECIPE, batch_invariant=True)
    rollout = Rollout(make_exact(converted))
    for count in sizes.sequences:
        ids = torch.randint(1, 1000, (count, 128), device=device)

        def exact(new: int, ids: Tensor = ids) -> None:
            rollout.generate(ids, max_new_tokens=new, do_sample=False)

        def plain(new: int, ids: Tensor = ids) -> None:
            made.generate(ids, max_new_tokens=new, do_sample=False, cache_implementation="static")

        for name, generate in (("bf16", plain), ("exact", exact)):
            short, long = 8, 8 + sizes.new
            # The first ones compile, and size the cache, which a graph reads at its address.
            for new in (long, short, long):
                generate(new)
            times = [wall(functools.partial(generate, new), device) for new in (short, long) * ROUNDS]
            found = (statistics.median(times[1::2]) - statistics.median(times[::2])) / sizes.new
            yield {"kind": "decode", "tokens": str(count), "contender": name, "seconds": found}
        rollout.release()
        torch._dynamo.reset()


def replay(graph: torch.cuda.CUDAGraph, owner: Step) -> None:
    """Replay a graph, which does not own what it reads: ``owner`` does."""
    graph.replay()


@torch.no_grad()
def decoding(made: Any, sizes: Sizes, count: int, device: torch.device, options: dict[str, bool]) -> Step:
    """A step that decodes the token behind the context: compiled, and on a GPU replayed as a CUDA graph."""
    from transformers import StaticCache

    ids = torch.randint(1, 1000, (count, sizes.context), device=device)
    cache = StaticCache(config=made.config, max_cache_len=sizes.context + 64)
    made(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    last = ids[:, -1:].clone()
    compiled = torch.compile(made, fullgraph=True, dynamic=False, options=options)

    @torch.no_grad()
    def decode_token() -> Tensor:
        # Each time at the same place.
        for layer in cache.layers:
            layer.cumulative_length.fill_(sizes.context)
        logits: Tensor = compiled(last, past_key_values=cache, use_cache=True).logits
        return logits

    if device.type == "cpu":
        return decode_token
    graph, _ = captured(decode_token)
    return functools.partial(replay, graph, decode_token)


def graph(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of a decoded token behind a context, by contender."""
    made = model(sizes, device).eval()
    converted = model(sizes, device)
    tritonfp8.convert(converted, RECIPE, batch_invariant=True)
    rollout = Rollout(make_exact(converted))
    for count in sizes.sequences:
        steps = {
            "bf16": decoding(made, sizes, count, device, {}),
            "exact": decoding(rollout.model, sizes, count, device, EXACT_CODE),
        }
        for name, found in zip(steps, seconds(list(steps.values()), device), strict=True):
            what = {"tokens": str(count), "context": sizes.context, "contender": name}
            yield {"kind": "graph", **what, "seconds": found}
        torch._dynamo.reset()


@torch.no_grad()
def refresh(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    """Rows of a refresh, and of a copy of all codes and scales."""
    for dtype in (torch.bfloat16, torch.float32):
        made = model(sizes, device).to(dtype)
        tritonfp8.convert(made, RECIPE, batch_invariant=True)
        rollout = Rollout(made)
        parts = [x for each in rollout.own if each.stored for x in each.tensor._both()]  # type: ignore[attr-defined]
        from_, to = ([x.view(torch.uint8).clone() for x in parts] for _ in range(2))

        def copy(from_: list[Tensor] = from_, to: list[Tensor] = to) -> None:
            torch._foreach_copy_(to, from_)

        for name, found in zip(("refresh", "copy"), seconds([rollout.refresh, copy], device), strict=True):
            dtype_name = str(dtype).removeprefix("torch.")
            yield {"kind": "refresh", "tokens": dtype_name, "contender": name, "seconds": found}


MEASURES = {"attention": attention, "step": step, "decode": decode, "graph": graph, "refresh": refresh}


def show(rows: list[dict[str, Any]]) -> None:
    """Print a line for each row."""
    table = Table("what", "tokens", "contender", "forward, ms", "all, ms")
    for row in rows:
        whole = row.get("both", row.get("seconds"))
        forward = f"{1e3 * row['forward']:.3f}" if "forward" in row else ""
        table.add_row(row["kind"], row["tokens"], row["contender"], forward, f"{1e3 * whole:.3f}")
    Console(width=110).print(table)


def main(
    only: Annotated[str, typer.Option(help="Of attention, step, decode, graph and refresh, separated by commas.")] = (
        "attention,step,decode,graph,refresh"
    ),
    smoke: Annotated[bool, typer.Option(help="Small sizes, which say nothing about speed.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for rollout.json.")] = None,
) -> None:
    """Measure what equal bits cost."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes, rows = SMOKE if smoke or device.type == "cpu" else Sizes(), []
    for name in only.split(","):
        for row in MEASURES[name](sizes, device):
            rows.append(row)
            write_results((out or results_folder()) / "rollout.json", {"sizes": sizes._asdict(), "rows": rows})
    show(rows)


if __name__ == "__main__":
    typer.run(main)
