"""Train a small Llama on text in FP8 with Hugging Face's Trainer, save it, and restore it with its recipes.

    python examples/transformers_trainer.py
    torchrun --nproc-per-node 2 examples/transformers_trainer.py --fsdp  # on GPUs

The text is the source of Python's standard library, a token a byte, so nothing is downloaded. Without a GPU the
reference implementation runs, which has the same numerics and no speed.
"""

import argparse

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tritonfp8
from tritonfp8.integrations.transformers import Float8Callback, Float8Config, restore
from tritonfp8.training import corpus

LENGTH = 64


class Bytes(Dataset):
    """Rows of ``LENGTH`` bytes of text."""

    def __init__(self, rows: int) -> None:
        text = corpus.load().data[: rows * LENGTH]
        self.rows = text.view(-1, LENGTH).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="rowwise", choices=tritonfp8.recipes.names())
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", default="runs/transformers-trainer")
    parser.add_argument("--fsdp", action="store_true", help="shard by FSDP2, with the FP8 all-gather")
    options = parser.parse_args()

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4)
    )
    args = TrainingArguments(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=max(1, options.steps // 5),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=torch.cuda.is_available(),
        **({"fsdp": True, "fsdp_config": {"version": 2}} if options.fsdp else {}),
    )
    # The first and the last tenth of the steps train in bf16.
    schedule = [(0, "bf16"), ("10%", options.recipe), ("90%", "bf16")]
    callback = Float8Callback(Float8Config(schedule=schedule))
    trainer = Trainer(model=model, args=args, train_dataset=Bytes(8 * options.steps), callbacks=[callback])
    print(callback.report)
    trainer.train()
    trainer.save_model(options.out)

    if trainer.is_world_process_zero():
        loaded = AutoModelForCausalLM.from_pretrained(options.out)
        print(f"restored: {len(restore(loaded).converted)} layers")


if __name__ == "__main__":
    main()
