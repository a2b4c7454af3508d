"""Train by GRPO in FP8 with TRL, with the same log-probs in generation and in training.

    pip install 'tritonfp8[rl]'
    python examples/grpo_exact.py

A rule rewards completions for tokens that are larger than the one before. The model is small and random, so nothing is
downloaded. ``Rollout`` generates with the codes of the weights that train, and TRL clips the ratio of the probabilities
in training and in generation: ``make_exact`` makes it exactly 1 where both have the same weights, which is in the first
of the two updates from each batch.
"""

import argparse
import itertools
import tempfile

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

import tritonfp8
from tritonfp8.rollout import Rollout, log_probs, make_exact, why_inexact

TOKENS, SPECIAL = 64, 2
NEW = 8


def tokenizer() -> PreTrainedTokenizerFast:
    """Words ``0`` to ``61``, behind padding and the end of a sequence."""
    names = ["<pad>", "<eos>", *(str(i) for i in range(TOKENS - SPECIAL))]
    found = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<pad>"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def reward_rising(completions: list[str], **others: object) -> list[float]:
    """The share of tokens that are larger than the one before."""
    rows = [[int(word) for word in text.split()] for text in completions]
    return [sum(b > a for a, b in itertools.pairwise(row)) / NEW for row in rows]


class ExactGRPOTrainer(GRPOTrainer):
    """GRPO whose log-probs of both sides are computed by one function, and whose ratio is taken of what generated."""

    rollout: Rollout | None = None

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        # Of each update: the smallest and the largest ratio.
        self.ratios: list[tuple[float, float]] = []

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **options):
        found = log_probs(model, input_ids, attention_mask, logits_to_keep, self.temperature)
        self._scored = found.detach()
        # The entropy is only logged: the log-prob of a token that was sampled estimates it.
        return found, -self._scored, None

    def compute_loss(self, model, inputs, *args, **options):
        """The loss of TRL, whose policy from before the update is the one that generated."""
        inputs["old_per_token_logps"] = inputs["sampling_per_token_logps"]
        loss = super().compute_loss(model, inputs, *args, **options)
        ratio = (self._scored - inputs["sampling_per_token_logps"]).exp()[inputs["completion_mask"] == 1]
        self.ratios.append((float(ratio.min()), float(ratio.max())))
        return loss


def generate(prompts: list[str], trainer: ExactGRPOTrainer) -> dict[str, list]:
    """The ``rollout_func`` of TRL: tokens and their log-probs, by the weights that train now."""
    if trainer.rollout is None:
        trainer.rollout = Rollout(trainer.accelerator.unwrap_model(trainer.model))
        print(trainer.rollout)
    trainer.rollout.refresh()
    device = trainer.accelerator.device
    batch = trainer.processing_class(prompts, return_tensors="pt", padding=True).to(device)
    made = trainer.rollout.generate(
        batch.input_ids, batch.attention_mask, max_new_tokens=NEW, temperature=trainer.temperature, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip

    def seen(x: torch.Tensor, mask: torch.Tensor) -> list[list]:
        return [row[taken == 1].tolist() for row, taken in zip(x, mask, strict=True)]

    new = made.sequences[:, batch.input_ids.shape[1] :]
    return {
        "prompt_ids": seen(batch.input_ids, batch.attention_mask),
        "completion_ids": seen(new, made.mask),
        "logprobs": seen(made.log_probs, made.mask),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="rowwise", choices=["rowwise", "blockwise", "mxfp8"])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=TOKENS, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    print(tritonfp8.convert(model, options.recipe, batch_invariant=True))
    make_exact(model)
    assert why_inexact(model) == {}

    prompts = [" ".join(map(str, range(first, first + length))) for first in range(8) for length in (2, 3, 5)]
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            folder, max_steps=options.steps, num_generations=8, per_device_train_batch_size=32,
            max_completion_length=NEW, num_iterations=2, learning_rate=2e-3, temperature=0.9, bf16=False,
            gradient_checkpointing=False, logging_steps=1, save_strategy="no", report_to=[],
        )  # fmt: skip
        trainer = ExactGRPOTrainer(
            model, reward_rising, settings, Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer(),
            rollout_func=generate,
        )  # fmt: skip
        trainer.train()
    rewards = [float(each["reward"]) for each in trainer.state.log_history if "reward" in each]
    print(f"reward: {rewards[0]:.3f} at the first step, {rewards[-1]:.3f} at the last")
    for update in (0, 1):
        of_each = trainer.ratios[update::2]
        print(f"update {update + 1} of each batch: ratios {min(of_each)[0]!r} to {max(high for _, high in of_each)!r}")


if __name__ == "__main__":
    main()
