"""from_pretrained: checkpoints of each format become models that generate, that adapters train on, and that train."""

import logging
from pathlib import Path

import datasets
import peft
import pytest
import torch
import transformers
from checkpoints import EXPERTS, WHOLE, model_of
from pretrained_cases import FORMATS, IDS, train, values, written

import tritonfp8
from tritonfp8.export import reading
from tritonfp8.integrations.transformers import from_pretrained
from tritonfp8.layers.stored import is_stored, stored_part
from tritonfp8.optim import AdamW


@pytest.fixture
def checkpoint(tmp_path):
    """Writes a checkpoint and returns its folder."""

    def write(format, *args, **options):
        return written(tmp_path / "it", format, *args, **options)

    return write


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", WHOLE), ("moe", EXPERTS)])
def test_the_recipe_that_reads_the_codes(checkpoint, caplog, kind, sizes, format):
    folder = checkpoint(format, kind, sizes)
    with caplog.at_level(logging.INFO, "tritonfp8"):
        model = from_pretrained(folder)
    layers = [m for m in model.modules() if getattr(m, "recipe", None) is not None]
    assert {m.recipe.name for m in layers} == {FORMATS[format][1]}
    assert all(map(is_stored, layers))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.is_meta or p.requires_grad for p in model.parameters())
    assert not model.training
    assert not hasattr(model.config, "quantization_config")
    # The values of a plain model that is filled from the same checkpoint.
    expected = model_of(kind, sizes, 1, torch.bfloat16)
    if format is None:
        expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tritonfp8.convert(expected, "rowwise", mode="inference")
    else:
        tritonfp8.export.load(expected, folder)
    assert (format is None) or "rounded again" not in caplog.text
    theirs = values(expected)
    assert all(torch.equal(x, theirs[name]) for name, x in values(model).items())
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("kind", "sizes"), [("llama", WHOLE), ("moe", EXPERTS)])
@pytest.mark.parametrize("ours", [True, False], ids=["our AdamW", "the Trainer's AdamW"])
def test_all_weights_train_in_the_trainer(checkpoint, tmp_path, ours, kind, sizes, format):
    model = from_pretrained(checkpoint(format, kind, sizes), train="full")
    before = values(model)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    of_experts = [m for m in model.modules() if hasattr(m, "recipe") and not is_stored(m)]
    assert len(of_experts) == (model.config.num_hidden_layers if kind == "moe" else 0)
    losses = train(model, tmp_path / "out", AdamW(model.parameters(), lr=1e-2) if ours else None)
    assert losses[-1] < losses[0]
    assert [name for name, x in values(model).items() if torch.equal(x, before[name])] == []
    assert sum(stored_part(p) is not None for p in model.parameters()) >= 4


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("kind", "sizes"), [("llama", WHOLE), ("moe", EXPERTS)])
def test_adapters_train_in_the_trainer(checkpoint, tmp_path, kind, sizes, format):
    base = from_pretrained(checkpoint(format, kind, sizes), train="adapters")
    assert base.training
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    before = values(model)
    losses = train(model, tmp_path / "out")
    assert losses[-1] < losses[0]
    moved = {name for name, x in values(model).items() if not torch.equal(x, before[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_supervised_fine_tuning_of_trl(checkpoint, tmp_path):
    from trl import SFTConfig, SFTTrainer

    model = from_pretrained(checkpoint("fine_grained", "llama"), train="adapters")
    settings = SFTConfig(
        str(tmp_path / "out"), max_steps=2, per_device_train_batch_size=2, bf16=False, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    rows = datasets.Dataset.from_dict({"input_ids": IDS.repeat(2, 1).tolist()})
    trainer = SFTTrainer(
        model, settings, train_dataset=rows, processing_class=tokenizer(),
        peft_config=peft.LoraConfig(target_modules=["q_proj"]),
    )  # fmt: skip
    before = values(trainer.model)
    trainer.train()
    moved = {name for name, x in values(trainer.model).items() if not torch.equal(x, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="0"))
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="0", eos_token="1")


def _anonymous_bytes():
    """Memory of this process that is of no file."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) * 1024


def _peak(folder, queue):
    """Puts the most memory that loading takes, before each tensor goes to its place, and the bytes in bfloat16."""
    before, found, real = _anonymous_bytes(), [], reading._fill

    def fill(*args):
        found.append(_anonymous_bytes() - before)
        return real(*args)

    reading._fill = fill
    model = from_pretrained(folder)
    queue.put((max(found), sum(2 * p.numel() for p in model.parameters())))


@pytest.mark.slow
@pytest.mark.parametrize("format", ["fine_grained", None])
def test_the_peak_of_memory_is_half_of_bfloat16(checkpoint, monkeypatch, format):
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_key_value_heads": 4, "head_dim": 128}
    folder = checkpoint(format, "llama", sizes, num_hidden_layers=40)
    # In another process, as memory that was freed in this one would be taken again. There the C library gives large
    # blocks back at once, which it otherwise keeps once one of their size was freed.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=_peak, args=(folder, queue), daemon=True)
    process.start()
    most, in_bfloat16 = queue.get()
    process.join()
    assert in_bfloat16 > 250e6
    assert 0.45 < most / in_bfloat16 <= 0.55


def test_another_recipe_says_what_it_costs(checkpoint, caplog):
    with caplog.at_level(logging.INFO, "tritonfp8"):
        from_pretrained(checkpoint("compressed_channel"), "blockwise")
    assert "7 rounded again (from " in caplog.text
    assert " dB)" in caplog.text


@pytest.mark.parametrize("format", ["fine_grained", None])
def test_tied_heads(checkpoint, format):
    folder = checkpoint(format, tie_word_embeddings=True)
    model = from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.std() > 0


def test_changes_of_the_config_and_dtype(checkpoint):
    folder = checkpoint("fine_grained")
    model = from_pretrained(str(folder), dtype=torch.float32, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.name_or_path == str(folder)
    assert torch.equal(logits(model), logits(from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")))


def test_mistakes(checkpoint, tmp_path, monkeypatch):
    folder = checkpoint("fine_grained")
    with pytest.raises(ValueError, match="train must be one of"):
        from_pretrained(folder, train="lora")
    with pytest.raises(ValueError, match="leave out dtype; got torch.bfloat16"):
        from_pretrained(folder, train="full", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="nowhere must be the folder of a checkpoint"):
        from_pretrained(tmp_path / "nowhere")
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("Qwen3ForCausalLM", "Qwen3ForNothing"))
    with pytest.raises(ValueError, match="name a class of transformers in 'architectures'; got Qwen3ForNothing"):
        from_pretrained(folder)
    (folder / "config.json").write_text(text)
    shard = next(folder.glob("model-00002*"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is no complete safetensors file"):
        from_pretrained(folder)
