"""Hugging Face's Trainer with FSDP2, with and without the FP8 all-gather, on all GPUs of one machine.

    torchrun --nproc-per-node 2 -m bench.distributed.trainer --out bench/results/nvidia-h200/trainer-x2

``Trainer`` with ``fsdp_version: 2`` trains a Qwen3 with random weights, loaded in bf16, once with and once without
``enable_float8_all_gather``. With ``--callback``, ``Float8Callback`` converts the model and enables the gather. With
``--share-gpu``, all processes use one GPU, and gloo in place of NCCL, which refuses that.

A run is valid only if every trainable parameter changed. Then the fp32 losses must be equal to the bit. Kernels are
deterministic, because torch's attention and the compiler's choice of kernels otherwise give different bits on each run,
with and without the gather.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import tritonfp8
from bench.contest.machine import command_line, write_results
from bench.distributed.compare import make_deterministic
from bench.distributed.run import QUANTIZED
from bench.models import digest, with_head
from tritonfp8 import Float8Linear
from tritonfp8.distributed import enable_float8_all_gather
from tritonfp8.distributed.fsdp.all_gather import Float8AllGather

VOCABULARY = 512


@dataclass(frozen=True)
class Program:
    """Settings of one Trainer run.

    Attributes:
        dtype: dtype of the loaded weights. The Trainer trains bf16 weights in mixed precision, with fp32 masters.
        ram_efficient: accelerate's ``cpu_ram_efficient_loading``, which shards on the meta device.
        compiled: ``"before"`` (``torch.compile(model)``), ``"argument"`` (``torch_compile=True``), or ``"both"``.
        backend: backend of ``torch.compile``.
        resume: save after half of the steps, and continue from the checkpoint in a new Trainer.
        callback: convert by ``Float8Callback``, instead of before the Trainer.
        schedule: whether the first step trains in bf16. The head then stays in high precision.
        sharded: by FSDP2; else the processes train copies by DistributedDataParallel.
        reshard: FSDP2's ``reshard_after_forward``.
        state_dict: how a checkpoint is saved, ``"SHARDED_STATE_DICT"`` or ``"FULL_STATE_DICT"``.
        accumulate: batches of a step.
        experts: experts of each layer; a token takes two. 0 for a model without experts.
        save: save the model at the end, and compare what ``from_pretrained`` loads. With sharded state dicts the
            Trainer saves no model.
    """

    recipe: str = "rowwise"
    gather: bool = True
    dtype: str = "bfloat16"
    ram_efficient: bool = False
    compiled: str = ""
    backend: str = "inductor"
    checkpointing: bool = False
    tied: bool = False
    resume: bool = False
    callback: bool = False
    schedule: bool = False
    sharded: bool = True
    reshard: bool = True
    state_dict: str = "SHARDED_STATE_DICT"
    accumulate: int = 1
    experts: int = 0
    save: bool = False
    layers: int = 8
    hidden: int = 512
    tokens: int = 128
    batch: int = 2
    steps: int = 5
    learning_rate: float = 1e-3
    use_cpu: bool = False


class Tokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """The same random tokens in every process."""

    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(VOCABULARY, (count, length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def model_of(program: Program) -> nn.Module:
    """A Qwen3, or a Qwen3-MoE, with the same weights in every process."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": program.hidden,
        "intermediate_size": 3 * program.hidden,
        "num_hidden_layers": program.layers,
        "num_attention_heads": program.hidden // 32,
        "num_key_value_heads": program.hidden // 64,
        "head_dim": 32,
        "tie_word_embeddings": program.tied,
        "use_cache": False,
    }
    model: nn.Module
    if program.experts:
        of_experts = {
            "num_experts": program.experts, "num_experts_per_tok": 2, "moe_intermediate_size": program.hidden,
        }  # fmt: skip
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **of_experts))
    else:
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes))
    return model.to(getattr(torch, program.dtype))


def _full(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    if not isinstance(value, DTensor):
        return value.float().cpu()
    if value.placements != (Shard(0),):
        raise ValueError(f"parameters must be sharded by rows; got {value.placements}")
    # By CPU tensors, because torch's functional all-gather of GPU tensors crashes with gloo.
    shards: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards, value.to_local().cpu())
    return torch.cat(shards).float()


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""), parameter


def trainer_of(
    program: Program, model: nn.Module, folder: str, steps: int, losses: list[float], callbacks: list[Any]
) -> Any:
    """A Trainer of ``model`` that notes the loss of each batch in ``losses``."""
    from transformers import Trainer, TrainingArguments

    def loss_of(outputs: Any, labels: Tensor, **kwargs: Any) -> Tensor:
        # Compute the loss in fp32. FSDP returns the model's own loss in bf16, in which different losses are often
        # equal, and the log rounds losses and writes NaN as 0.
        logits = outputs.logits[:, :-1].float().flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten())
        losses.append(loss.item())
        return loss

    sharding = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["Qwen3MoeDecoderLayer" if program.experts else "Qwen3DecoderLayer"],
            "cpu_ram_efficient_loading": program.ram_efficient,
            "reshard_after_forward": program.reshard,
            "state_dict_type": program.state_dict,
            **({"activation_checkpointing": True} if program.checkpointing else {}),
        },
    }
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=program.batch,
        gradient_accumulation_steps=program.accumulate,
        learning_rate=program.learning_rate,
        lr_scheduler_type="constant",
        bf16=program.dtype == "bfloat16",
        **(sharding if program.sharded else {}),
        torch_compile=program.compiled in ("argument", "both"),
        torch_compile_backend=program.backend if program.compiled in ("argument", "both") else None,
        save_strategy="steps" if program.resume else "no",
        save_steps=max(1, program.steps // 2),
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=program.use_cpu,
        # The Trainer cannot read the argument names of a compiled model.
        remove_unused_columns=False,
        seed=0,
    )
    count = program.batch * program.accumulate * program.steps * dist.get_world_size()
    return Trainer(
        model=model,
        args=args,
        train_dataset=Tokens(count, program.tokens),
        compute_loss_func=loss_of,
        callbacks=callbacks,
    )


def sums_of_gradients() -> Any:
    """A callback that has FSDP divide sums of gradients itself: gloo cannot compute means."""
    from torch.distributed.fsdp import FSDPModule
    from transformers import TrainerCallback

    class Sums(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_force_sum_reduction_for_comms(True)

    return Sums()


def _converters(program: Program, model: nn.Module) -> list[Any]:
    """Convert the model, or return the callback that will."""
    if program.callback:
        from tritonfp8.integrations.transformers import Float8Callback, Float8Config

        stages = [(0, "bf16"), (1, program.recipe)] if program.schedule else None
        gather = program.gather if program.sharded else None
        return [Float8Callback(Float8Config(with_head(program.recipe), all_gather=gather, schedule=stages))]
    if program.recipe != "bf16":
        tritonfp8.convert(model, with_head(program.recipe))
    if program.gather:
        enable_float8_all_gather(model)
    return []


def gathered_layers(model: nn.Module) -> list[Float8Linear]:
    """The layers whose weight FSDP gathers in 8 bits."""
    return [m for m in model.modules() if isinstance(m, Float8Linear) and m.on_revert is not None]


def gathered_experts(model: nn.Module) -> list[str]:
    """The weights of experts that FSDP gathers in 8 bits."""
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    sources = {owner for hook in hooks if isinstance(owner := getattr(hook, "__self__", None), Float8AllGather)}
    weights = [weight for source in sources for weight in source.weights.values()]
    return [weight.name for weight in weights if weight.of_experts and weight.plan is not None]


def reset() -> None:
    """Reset accelerate's process-wide state, so that the next Trainer uses its own settings."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    # The Trainer hands its options for FSDP to accelerate by these.
    for name in [name for name in os.environ if name == "ACCELERATE_USE_FSDP" or name.startswith("FSDP_")]:
        del os.environ[name]
    torch.compiler.reset()


def train(program: Program) -> dict[str, Any]:
    """Train once: losses of this rank's steps, parameters that did not change, and a digest of the final ones."""
    losses: list[float] = []
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    halves = [max(1, program.steps // 2), program.steps] if program.resume else [program.steps]
    for index, steps in enumerate(halves):
        model = model_of(program)
        before = {name: _full(p) for name, p in _named(model)}
        callbacks = _converters(program, model)
        called: Any = model
        if program.compiled in ("before", "both"):
            called = torch.compile(model, backend=program.backend)
        if not program.use_cpu and "nccl" not in dist.get_backend_config():
            callbacks.append(sums_of_gradients())
        trainer = trainer_of(program, called, folder[0], steps, losses, callbacks)
        trainer.train(resume_from_checkpoint=index > 0 or None)
        gathered, of_experts = len(gathered_layers(model)), len(gathered_experts(model))
        if program.save:
            trainer.save_model(f"{folder[0]}/model")
        reset()
    final = {name: _full(parameter) for name, parameter in _named(model)}
    return {
        "losses": losses,
        "stuck": [name for name, value in final.items() if torch.equal(value, before[name])],
        "gathered": gathered,
        "gathered_experts": of_experts,
        "digest": digest(final),
        **({"saved": digest(_loaded(f"{folder[0]}/model"))} if program.save else {}),
    }


def _loaded(folder: str) -> dict[str, Tensor]:
    """The parameters that ``from_pretrained`` loads, as :func:`_full`."""
    from transformers import Qwen3ForCausalLM

    dist.barrier()
    return {
        name: _full(p) for name, p in Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters()
    }


def compare(program: Program) -> dict[str, Any]:
    """Train with and without the gather; ``ok`` if all parameters changed, no loss is NaN, and all bits are equal."""
    on, off = (train(replace(program, gather=gather)) for gather in (True, False))
    finite = all(loss == loss for loss in (*on["losses"], *off["losses"]))
    ok = not on["stuck"] and not off["stuck"] and finite and len(on["losses"]) == program.steps * program.accumulate
    ok = ok and on["losses"] == off["losses"] and on["digest"] == off["digest"]
    found = {"program": asdict(program), "on": on, "off": off, "ok": ok}
    # Run without the gather again, to see whether its bits are reproducible.
    return found if ok else {**found, "off_again": train(replace(program, gather=False))}


def programs(names: list[str], variants: bool, callback: bool = False, experts: int = 0) -> list[Program]:
    """The program in which most weights once did not train, in every recipe; then variants with one change each.

    Through the callback, each recipe is also trained without ``torch.compile``.
    """
    first = Program(ram_efficient=True, compiled="both", callback=callback, experts=experts)
    options: list[dict[str, Any]] = [
        {"compiled": ""},
        {"compiled": "", "dtype": "float32"},
        {"compiled": "before", "ram_efficient": False},
        {"compiled": "argument", "checkpointing": True},
        {"compiled": "", "tied": True},
        {"compiled": "", "resume": True},
    ]
    every = [replace(first, recipe=name) for name in names]
    if callback:
        every += [replace(program, compiled="") for program in every]
        options[0] = {"compiled": "", "schedule": True}
    if not variants:
        return every
    return every + [replace(first, recipe=names[i % len(names)], **option) for i, option in enumerate(options)]


def _shown(row: dict[str, Any]) -> str:
    program = row["program"]
    changes = " ".join(f"{k}={v}" for k, v in program.items() if v != getattr(Program(), k) and k != "recipe")
    losses = " ".join(f"{loss:.4f}" for loss in row.get("on", {}).get("losses", []))
    return f"{'ok ' if row['ok'] else 'BAD'} {program['recipe']:<24}{changes}: {losses}"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    names: Annotated[str, typer.Option("--recipes", help="Comma-separated.")] = QUANTIZED,
    variants: Annotated[bool, typer.Option(help="Also run variants with one change each.")] = True,
    callback: Annotated[bool, typer.Option(help="Convert by Float8Callback.")] = False,
    experts: Annotated[int, typer.Option(help="Experts of each layer; a token takes two. 0: none.")] = 0,
    share_gpu: Annotated[bool, typer.Option(help="All processes on one GPU, by gloo.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for trainer.json.")] = None,
) -> None:
    make_deterministic()
    if share_gpu:
        # accelerate takes it for the index of this rank's GPU.
        os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("cpu:gloo,cuda:gloo" if share_gpu else "cpu:gloo,cuda:nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    rows: list[dict[str, Any]] = []
    for program in programs(names.split(","), variants, callback, experts):
        try:
            row = compare(program)
        except Exception:
            row = {"program": asdict(program), "ok": False, "error": traceback.format_exc()[-3000:]}
        rows.append(row)
        if dist.get_rank() == 0:
            print(_shown(row), row.get("error", ""), flush=True)
            if out is not None:
                launched = command_line().replace("python", f"torchrun --nproc-per-node {dist.get_world_size()}", 1)
                write_results(out / "trainer.json", {"command": launched, "rows": rows})
        if "error" in row:
            break
    dist.destroy_process_group()
    sys.exit(not all(row["ok"] for row in rows))


if __name__ == "__main__":
    app()
