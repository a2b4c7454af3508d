"""Time the first training step of this process: ``python -m bench.first_step --model 8b-slice --recipe rowwise``.

Prints one line of JSON: seconds of the first step including compilation, and how many more launches of this package's
Triton kernels it had than the second step. More launches mean that the step benchmarked configurations.
With ``--profile`` it also has the seconds by package, in a step that Python's profiler makes slower.
"""

import contextlib
import cProfile
import json
import pstats
import time
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import torch
import torch.nn.functional as F
import triton
import typer

import tritonfp8
from bench.models import with_head
from tritonfp8.advice import is_own
from tritonfp8.training import MODELS

VOCABULARY = 256
# Of installed packages. The first that fits counts.
PACKAGES = ("torch/_dynamo", "torch/_inductor", "torch/_functorch", "torch", "sympy", "triton", "transformers")
# The longest functions of C are listed by themselves.
LISTED = 8


def build(name: str, recipe: str, device: str, sequence: int) -> torch.nn.Module:
    """The float32 model on the device, converted to the recipe."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {key: value for key, value in vars(MODELS[name]).items() if key != "lr"}
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=sequence, tie_word_embeddings=False, **sizes)
    with torch.device(device):
        model = LlamaForCausalLM(config)
    if recipe != "bf16":
        tritonfp8.convert(model, with_head(recipe))
    return model


def package_of(path: str) -> str:
    """The package that a file is of: this one, one of :data:`PACKAGES`, or ``other``."""
    if f"/{tritonfp8.__name__}/" in path:
        return tritonfp8.__name__
    installed = path.rpartition("site-packages/")[2]
    return next((name for name in PACKAGES if installed.startswith(f"{name}/")), "other")


def by_package(profiler: cProfile.Profile) -> dict[str, float]:
    """Seconds in the functions of each package, without their callees; the longest functions of C by name."""
    found: Counter[str] = Counter()
    builtins: Counter[str] = Counter()
    for (path, _, name), (_, _, own, _, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if path == "~":
            builtins[name] += own
        else:
            found[package_of(path)] += own
    listed = dict(builtins.most_common(LISTED))
    found.update(listed)
    found["other functions of C"] = builtins.total() - sum(listed.values())
    return dict(found.most_common())


@contextlib.contextmanager
def profiled(found: dict[str, float], wanted: bool) -> Iterator[None]:
    """Fill ``found`` with the seconds by package of this block, if wanted."""
    if not wanted:
        yield
        return
    profiler = cProfile.Profile()
    # The profiler sees one thread, so backward must run on it.
    with torch.autograd.set_multithreading_enabled(False), profiler:
        yield
    found.update(by_package(profiler))


def main(
    model: Annotated[str, typer.Option(help="A model of `tritonfp8 train`.")],
    recipe: Annotated[str, typer.Option(help="A recipe, or bf16.")],
    batch: int = 4,
    sequence: int = 4096,
    device: str = "cuda",
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Add the seconds by package.")] = False,
) -> None:
    """Run two steps under bf16 autocast, and print the seconds and the extra launches of the first."""
    network = build(model, recipe, device, sequence)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(VOCABULARY, (batch, sequence + 1), device=device)
    launches: Counter[str] = Counter()
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: launches.update([metadata.get()["name"]]))

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = network(input_ids=tokens[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())

    loss = loss_of if eager else torch.compile(loss_of)

    def step() -> tuple[float, int]:
        launches.clear()
        start = time.perf_counter()
        loss(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return seconds, sum(count for name, count in launches.items() if is_own(name))

    parts: dict[str, float] = {}
    with profiled(parts, profile):
        seconds, first = step()
    _, second = step()
    found = {"step_seconds": seconds, "extra_launches": first - second}
    print(json.dumps(found | ({"profile": parts} if profile else {})))


if __name__ == "__main__":
    typer.run(main)
