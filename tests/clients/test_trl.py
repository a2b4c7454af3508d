"""SFTTrainer of TRL with Float8Callback."""

import datasets
import pytest
import torch
from cases import each_recipe
from datasets.table import InMemoryTable
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tritonfp8 import Float8Linear
from tritonfp8.integrations.transformers import Float8Callback

VOCABULARY = {**{chr(97 + i): i for i in range(26)}, "<pad>": 26, "<eos>": 27, "<unk>": 28}


def tokens():
    rows = torch.randint(26, (16, 12), generator=torch.Generator().manual_seed(0)).tolist()
    # With a fingerprint of its own: the one that datasets makes needs dill to pickle the types of pyarrow.
    return datasets.Dataset(InMemoryTable.from_pydict({"input_ids": rows}), fingerprint="tokens")


@pytest.mark.in_turn(6)
@each_recipe
def test_supervised_fine_tuning_moves_every_weight(tmp_path, recwarn, recipe):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    args = SFTConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, bf16=False,
        report_to=[], use_cpu=True, logging_steps=1, disable_tqdm=True, save_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=tokens(),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
        ),
        callbacks=[Float8Callback(recipe)],
    )
    trainer.train()
    layers = [module for module in trainer.model.modules() if isinstance(module, Float8Linear)]
    assert {layer.recipe.name for layer in layers} == {recipe}
    assert len(layers) == 2 * 7
    assert not [name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])]
    assert not [each for each in recwarn if "trainable weights moved" in str(each.message)]
