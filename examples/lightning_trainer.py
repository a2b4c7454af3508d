"""Train a small Llama on text in FP8 with Lightning's Trainer.

    python examples/lightning_trainer.py

The text is the source of Python's standard library, a token a byte, so nothing is downloaded. Without a GPU the
reference implementation runs, which has the same numerics and no speed.
"""

import argparse

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import tritonfp8
from tritonfp8.integrations.lightning import trainer_plugin
from tritonfp8.training import corpus

LENGTH = 64


class Llama(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4
        )
        self.model = LlamaForCausalLM(config)
        self.losses: list[torch.Tensor] = []

    def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="rowwise", choices=tritonfp8.recipes.names())
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()

    rows = corpus.load().data[: 8 * options.steps * LENGTH].view(-1, LENGTH).long()
    plugin = trainer_plugin(options.recipe, precision="bf16-mixed" if torch.cuda.is_available() else "32-true")
    trainer = lightning.Trainer(
        max_steps=options.steps, plugins=[plugin], logger=False, enable_checkpointing=False, enable_model_summary=False
    )
    module = Llama()
    trainer.fit(module, DataLoader(rows, batch_size=8))
    print(plugin.report)
    print(f"loss: {module.losses[0]:.3f} at the first step, {module.losses[-1]:.3f} at the last")


if __name__ == "__main__":
    main()
