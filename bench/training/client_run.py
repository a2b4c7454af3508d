"""One training run of :mod:`bench.training.client`: the model, its rows, the Trainer, and what it gave."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import tritonfp8
from bench.distributed.kernels import kernels_of
from bench.distributed.trainer import sums_of_gradients
from bench.models import sums_of, with_head
from tritonfp8.distributed import count_collective_bytes, enable_float8_all_gather
from tritonfp8.training import corpus, timers

BASELINE, STORED, PEER, HEAD = "bf16", " stored", "torchao ", " with head"
IN_BACKWARD = f"{STORED} in backward"
WARM_UP = 5
CAUSAL = "causal"
# The shortest row of a padded batch has this share of the longest one's tokens.
SHORTEST = 0.25
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512,
    },
    "8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        model: a name of :data:`MODELS`.
        way: ``"full"`` or ``"lora"``.
        contender: ``"bf16"``, a recipe, a recipe and ``" stored"``, ``" stored in backward"`` or ``" with head"``, or
            ``"torchao "`` and a recipe of torchao.
        checkpointing: whether activations are recomputed in backward.
        padded: whether rows have different lengths; else a row is full.
        batch: rows of a step.
        length: tokens of the longest row.
        steps: optimizer steps; the first :data:`WARM_UP` are not timed. See :attr:`all_steps`.
        layers: so many; 0 for the model's.
        dtype: of weights that are not stored in 8 bits.
        gib: limit of the GPU's memory; 0 for all of it.
        compiled: whether the Trainer compiles.
        regions: whether it compiles block by block (accelerate's regional compilation); else the model as a whole.
        attention: :data:`CAUSAL`, or ``"sdpa"``, for which transformers builds a mask where it compiles or rows differ.
        device: cpu or cuda.
        ranks: processes, a GPU each, among which FSDP2 shards the model; recipes gather in 8 bits.
    """

    model: str
    way: str
    contender: str
    checkpointing: bool = True
    padded: bool = False
    batch: int = 2
    length: int = 4096
    steps: int = 15
    layers: int = 0
    dtype: str = "bfloat16"
    gib: float = 0.0
    compiled: bool = True
    regions: bool = False
    attention: str = CAUSAL
    device: str = "cuda"
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks > 1 and (self.way != "full" or self.padded or self.is_stored):
            raise ValueError(f"several ranks need the way 'full', packed rows, and weights in values; got {self}")

    @property
    def all_steps(self) -> int:
        """With the one that is profiled, and of several ranks one in which bytes are counted."""
        return self.steps + 1 + (self.ranks > 1)

    @property
    def recipe(self) -> str:
        """The recipe of a contender that is neither :data:`BASELINE` nor torchao's."""
        return self.contender.partition(STORED)[0].removesuffix(HEAD)

    @property
    def is_stored(self) -> bool:
        """Whether weights are stored in 8 bits."""
        return STORED in self.contender


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of bytes of text; padded ones are of different lengths, the same for every contender."""

    def __init__(self, run: Run) -> None:
        count = run.batch * run.all_steps * run.ranks
        (rows,) = corpus.batches(corpus.load(), steps=1, batch_size=count, seq_len=run.length - 1, seed=0)
        self.rows = rows.long()
        generator = torch.Generator().manual_seed(1)
        shares = SHORTEST + (1 - SHORTEST) * torch.rand(count, generator=generator)
        self.lengths = (shares * run.length).long() if run.padded else torch.full((count,), run.length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index, : self.lengths[index]]
        return {"input_ids": row, "labels": row}


def collated(rows: list[dict[str, Tensor]], length: int) -> dict[str, Tensor]:
    """A batch that is padded to ``length``, so that a compiled model sees one shape."""

    def padded(name: str, value: int) -> Tensor:
        return torch.stack([nn.functional.pad(row[name], (0, length - len(row[name])), value=value) for row in rows])

    batch = {"input_ids": padded("input_ids", 0), "labels": padded("labels", -100)}
    if all(len(row["input_ids"]) == length for row in rows):
        return batch
    return batch | {"attention_mask": (batch["labels"] != -100).long()}


def register_causal_attention() -> None:
    """Let transformers know the attention :data:`CAUSAL`: torch's, which is told to be causal and gets no mask.

    With a mask the kernels also compute what it hides, and each head gets a copy of the keys and values of its group. A
    row here is one text, with padding behind it, which causal attention does not see.
    """
    import transformers
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register(CAUSAL, sdpa_attention_forward)
    transformers.AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)


def model_of(run: Run) -> nn.Module:
    """The model with random weights, converted as the contender converts it, with adapters for ``lora``."""
    import transformers

    config = {**MODELS[run.model], "use_cache": False, "max_position_embeddings": max(run.length, 2048)}
    if run.layers:
        config["num_hidden_layers"] = run.layers
    config["attn_implementation"] = run.attention
    if run.attention == CAUSAL:
        register_causal_attention()
    stored, lora = run.is_stored, run.way == "lora"
    torch.manual_seed(0)
    # Weights that train as codes count as float32.
    torch.set_default_dtype(torch.float32 if stored and not lora else getattr(torch, run.dtype))
    with torch.device(run.device):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    torch.set_default_dtype(torch.float32)
    if run.contender.startswith(PEER):
        _convert_by_torchao(model, run.contender.removeprefix(PEER))
    elif run.contender != BASELINE:
        ways = {"mode": "inference"} if lora else {"weight_storage": "quantized" if stored else "parameters"}
        tritonfp8.convert(model, with_head(run.recipe) if run.contender.endswith(HEAD) else run.recipe, **ways)
        if run.ranks > 1:
            enable_float8_all_gather(model)
    if lora:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=16, task_type="CAUSAL_LM"))
    return model


def _convert_by_torchao(model: nn.Module, recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        model,
        config=Float8LinearConfig.from_recipe_name(recipe),
        module_filter_fn=lambda module, name: isinstance(module, nn.Linear) and "lm_head" not in name,
    )


def trainer_of(run: Run, model: nn.Module, folder: str, callbacks: list[Any]) -> Any:
    """transformers' Trainer of the model."""
    from transformers import Trainer, TrainingArguments

    sharding: dict[str, Any] = {
        "fsdp": True,
        "fsdp_config": {
            "version": 2,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "activation_checkpointing": run.checkpointing,
        },
    }
    args = TrainingArguments(
        output_dir=folder,
        max_steps=run.all_steps,
        per_device_train_batch_size=run.batch,
        learning_rate=1e-4,
        bf16=run.device == "cuda",
        use_cpu=run.device == "cpu",
        optim="adamw_torch_fused",
        **(sharding if run.ranks > 1 else {}),
        gradient_checkpointing=run.checkpointing and run.ranks == 1,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        torch_compile=run.compiled,
        logging_steps=1,
        save_strategy="no",
        # A norm of all gradients needs all of them at one time.
        max_grad_norm=0.0 if run.contender.endswith(IN_BACKWARD) else 1.0,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        seed=0,
    )
    optimizers: tuple[Any, Any] = (None, None)
    if run.is_stored and run.way == "full":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = tritonfp8.optim.AdamW(trained, lr=1e-4, moments="fp8")
        optimizers = (optimizer, None)
        if run.contender.endswith(IN_BACKWARD):
            step_in_backward(trained, optimizer)
    return Trainer(
        model=model,
        args=args,
        train_dataset=Rows(run),
        data_collator=lambda rows: collated(rows, run.length),
        callbacks=callbacks,
        optimizers=optimizers,
    )


def step_in_backward(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Step each parameter when its gradient is there, and free the gradient."""

    def step(parameter: Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(step)


def _clock(run: Run, model: nn.Module) -> Any:
    """A callback: the times at the end of the warm-up and of ``run.steps``, all losses, and the profile of one step."""
    from transformers import TrainerCallback

    device = torch.device(run.device)

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.begin = self.first_step = 0.0
            self.before: dict[str, tuple[float, float]] = {}
            self.times: list[float] = []
            self.losses: list[float] = []
            self.profiler = torch.profiler.profile()
            self.traffic = count_collective_bytes()

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if run.ranks > 1 and not isinstance(model, FSDPModule):
                raise RuntimeError("the Trainer did not shard the model by FSDP2")
            self.before = sums_of(model)
            self.begin = time.perf_counter()

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == run.steps:
                self.profiler.start()
            if state.global_step == run.steps + 1:
                self.traffic.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 1:
                timers.synchronize(device)
                self.first_step = time.perf_counter() - self.begin
            if state.global_step in (min(WARM_UP, run.steps - 1), run.steps, run.steps + 1):
                timers.synchronize(device)
                self.times.append(time.perf_counter())
            if state.global_step == run.steps + 1:
                self.profiler.stop()
            if state.global_step == run.steps + 2:
                self.traffic.__exit__(None, None, None)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            if "loss" in logs:
                self.losses.append(logs["loss"])

    return Clock()


def train(run: Run) -> dict[str, Any]:
    """Train once.

    Returns:
        ``tokens_per_second`` of a rank, padding not counted; ``peak_gib`` of allocated memory; ``first_step_seconds``,
        in which the model is compiled; ``losses``; ``parameters`` of the model, and ``stuck``, the trainable ones that
        did not change; ``bytes`` of a step by collective; ``profile``, see :func:`kernels_of`.
    """
    if run.ranks > 1 and run.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    model = model_of(run)
    if run.gib and run.device == "cuda":
        # After the model was made in high precision, which a checkpoint in 8 bits never is.
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction(run.gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    clock = _clock(run, model)
    # Gloo cannot compute the mean of gradients.
    callbacks = [clock, sums_of_gradients()] if run.ranks > 1 and run.device == "cpu" else [clock]
    # accelerate reads it when the Trainer is made, and a later run in this process must not.
    regions = {"ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": str(int(run.regions))}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, regions):
        trainer_of(run, model, folder, callbacks).train()
    after = sums_of(model)
    rows = Rows(run)
    timed = rows.lengths[run.batch * min(WARM_UP, run.steps - 1) : run.batch * run.steps].sum().item()
    return {
        "tokens_per_second": timed / (clock.times[1] - clock.times[0]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if run.device == "cuda" else None,
        "first_step_seconds": clock.first_step,
        "losses": clock.losses,
        "parameters": sum(p.numel() for p in model.parameters()),
        "stuck": [name for name, sums in after.items() if sums == clock.before[name]],
        "bytes": clock.traffic.bytes if run.ranks > 1 else {},
        "profile": kernels_of(clock.profiler),
    }
