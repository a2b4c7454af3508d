"""Models of every family of transformers that makes logits, on the meta device."""

import functools

import torch
import transformers
from transformers.models.auto import modeling_auto

# Sizes that no other part of a model has: a layer with so many features makes logits.
VOCAB, LABELS = 4999, 499
TASKS = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION",
    "QUESTION_ANSWERING", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION", "IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION", "CTC", "SPEECH_SEQ_2_SEQ", "IMAGE_TEXT_TO_TEXT",
)  # fmt: skip
_LAYERS = {
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "num_encoder_layers", "layers",
}  # fmt: skip
# What some configs leave to those who write them.
_MISSING = {"head_dim": 64, "num_key_value_heads": 8, "vocab_size": VOCAB, "num_local_experts": 4}


def classes(task):
    """The names of the classes of a task."""
    found = []
    for names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values():
        found += [names] if isinstance(names, str) else names
    return list(dict.fromkeys(found))


@functools.cache
def failure(name):
    """Why a class cannot be made here, as text; None if it can."""
    try:
        made(name)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:120]
    return None


def made(name):
    """A model of this class with few layers, on the meta device, whose logits have ``VOCAB`` or ``LABELS`` features."""
    cls = getattr(transformers, name)
    config = _sized(cls.config_class())
    config.num_labels = 2 if name == "DistilBertForQuestionAnswering" else LABELS
    if name == "ReformerModelWithLMHead":
        config.is_decoder = True
    with torch.device("meta"):
        return cls(config)


def _sized(config):
    for key, value in list(vars(config).items()):
        if isinstance(value, transformers.PretrainedConfig):
            _sized(value)
        elif key in _LAYERS and type(value) is int:
            vars(config)[key] = min(value, 2)
        elif key in _MISSING and value is None:
            vars(config)[key] = _MISSING[key]
        elif "vocab_size" in key and type(value) is int and value > 0:
            vars(config)[key] = VOCAB
        elif key.endswith("token_id") and type(value) is int:
            vars(config)[key] = min(value, VOCAB - 1)
    return config
