"""The model and the Trainer of the tests of Float8Callback."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tritonfp8.specs.testing import assert_bitwise_equal

VOCABULARY = 96


class Tokens(Dataset):
    """Random tokens, the same for each index."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        row = torch.randint(VOCABULARY, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


def llama(vocabulary=VOCABULARY, **options):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, **{"use_cache": False, **options},
    )  # fmt: skip
    return LlamaForCausalLM(config)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_trained(model, before, expected=None):
    """Every weight has changed, to the bits that the other model has."""
    for name, value in model.named_parameters():
        assert not torch.equal(value, before[name]), name
        if expected is not None:
            assert_bitwise_equal(value.detach(), expected.get_parameter(name).detach())


def trainer(model, folder, *callbacks, **options):
    settings = {"max_steps": 4, "learning_rate": 1e-2, "save_strategy": "no", **options}
    settings.setdefault("lr_scheduler_type", "constant")
    args = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, logging_steps=1, report_to=[], disable_tqdm=True,
        use_cpu=True, seed=0, **settings,
    )  # fmt: skip
    return Trainer(model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=list(callbacks))
