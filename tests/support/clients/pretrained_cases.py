"""Checkpoints in each format, and training by the real Trainer."""

import torch
from checkpoints import WHOLE, model_of
from transformers import Trainer, TrainingArguments

import tritonfp8
from tritonfp8.layers.stored import plain_weight

# By format the recipe that writes it, and the recipe that reads its codes.
FORMATS = {
    "fine_grained": ("blockwise", "blockwise"), "compressed_block": ("blockwise", "blockwise"),
    "compressed_channel": ("rowwise", "rowwise"), "compressed_tensor": ("tensorwise", "rowwise"),
    "compressed_mxfp8": ("mxfp8", "mxfp8"), None: (None, "rowwise"),
}  # fmt: skip
IDS = torch.arange(3, 19).view(2, 8)


def written(folder, format, kind="qwen3", sizes=WHOLE, **options):
    """Writes a checkpoint and returns its folder."""
    model = model_of(kind, sizes, dtype=torch.bfloat16, **options)
    is_small = sizes["hidden_size"] < 512
    if format is None:
        model.save_pretrained(folder, max_shard_size="100KB" if is_small else "50MB")
    else:
        tritonfp8.convert(model, FORMATS[format][0])
        tritonfp8.export.save(model, folder, format, max_shard_bytes=100_000 if is_small else 50_000_000)
    return folder


def values(model):
    """The values of all parameters."""
    return {name: plain_weight(parameter.detach()).clone() for name, parameter in model.named_parameters()}


def contents(folder):
    """The bytes of each file."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def differing(folder, other):
    """The files that two folders do not have alike."""
    found, theirs = contents(folder), contents(other)
    return sorted(name for name in found.keys() | theirs.keys() if found.get(name) != theirs.get(name))


def train(model, folder, optimizer=None, steps=10, save_steps=None, resume=False, bf16=False, **columns):
    """Steps of the real Trainer. Returns the losses.

    Args:
        model, folder, optimizer, steps, bf16: as the Trainer takes them.
        save_steps: steps from one checkpoint in ``folder`` to the next; None saves none.
        resume: whether to go on from the last of them.
        **columns: that each row has, too.
    """
    arguments = TrainingArguments(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=2, lr_scheduler_type="constant",
        logging_steps=1, learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, seed=0, bf16=bf16,
        save_strategy="steps" if save_steps else "no", save_steps=save_steps or 1, remove_unused_columns=not columns,
    )  # fmt: skip
    rows = torch.randint(3, 64, (2, 16), generator=torch.Generator().manual_seed(0)).tolist()
    data = [{"input_ids": row, "labels": row, **columns} for row in rows * 10]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
    trainer.train(resume_from_checkpoint=resume or None)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
