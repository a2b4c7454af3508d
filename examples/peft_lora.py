"""Train LoRA adapters of peft on a frozen Llama that computes in FP8.

    python examples/peft_lora.py

The text is the source of Python's standard library, a token a byte, so nothing is downloaded. Without a GPU the
reference implementation runs, which has the same numerics and no speed.
"""

import argparse

import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tritonfp8
from tritonfp8.training import corpus

BATCH, LENGTH = 8, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="rowwise", choices=tritonfp8.recipes.names())
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).to(device)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    model = peft.get_peft_model(model, lora)
    tritonfp8.convert(model, options.recipe)

    rows = corpus.load().data[: options.steps * BATCH * LENGTH].view(options.steps, BATCH, LENGTH).long().to(device)
    print(tritonfp8.verify(model, input_ids=rows[0], labels=rows[0]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for tokens in rows:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")


if __name__ == "__main__":
    main()
