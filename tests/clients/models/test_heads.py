"""Every family of transformers that makes logits: ``convert`` never takes the layer that makes them.

That layer is found only by its size: the vocabulary and the number of labels are sizes that nothing else has.
"""

import model_families
import pytest
from model_families import LABELS, TASKS, VOCAB

import tritonfp8
from tritonfp8.conversion.selection import linears, sizes_of

pytestmark = pytest.mark.one_in(4)
# Of 771 classes, with what is missing here: a library, or a config that its defaults do not make.
NOT_MADE = {
    "timm library": (
        "Gemma3nForConditionalGeneration", "TimmWrapperForImageClassification", "FastVlmForConditionalGeneration",
        "PerceptionLMForConditionalGeneration",
    ),
    "detectron2 library": (
        "LayoutLMv2ForSequenceClassification", "LayoutLMv2ForTokenClassification", "LayoutLMv2ForQuestionAnswering",
    ),
    "natten library": ("DinatForImageClassification",),
    "No module named 'scipy'": ("InklingForConditionalGeneration",),
    "cannot be instantiated because not both": (
        "EncoderDecoderModel", "SpeechEncoderDecoderModel", "VisionEncoderDecoderModel",
    ),
    # Defaults that do not fit each other.
    "": (
        "CohereCompassForCausalLM", "CohereCompassTextForSequenceClassification",
        "CohereCompassForConditionalGeneration", "DbrxForCausalLM", "Dots1ForCausalLM", "Gemma4AssistantForCausalLM",
        "Gemma4UnifiedAssistantForCausalLM", "Lfm2MoeForCausalLM", "PerceiverForImageClassificationFourier",
        "PerceiverForImageClassificationConvProcessing", "MoonshineStreamingForConditionalGeneration",
        "AyaVisionForConditionalGeneration", "ChameleonForConditionalGeneration",
        "DeepseekOcr2ForConditionalGeneration", "DiffusionGemmaForBlockDiffusion", "Emu3ForConditionalGeneration",
        "Granite4VisionForConditionalGeneration",
    ),
}  # fmt: skip
_REASON = {name: reason for reason, names in NOT_MADE.items() for name in names}
# Their logits come of a convolution, of the weight of an embedding, or are no words.
_NO_LINEAR = {"LasrForCTC", "ParakeetForCTC", "PerceiverForMaskedLM", "PI0ForConditionalGeneration"}
# These have one or two logits, which are too few to be converted: layers of other sizes are not asked for.
_FEW = {"QUESTION_ANSWERING", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION"}


def makes_logits(layer):
    features = sizes_of(layer)[1]
    return features == LABELS or features % VOCAB == 0


@pytest.mark.parametrize("task", TASKS)
def test_no_layer_that_makes_logits_is_converted(task):
    taken, without = {}, []
    for name in model_families.classes(task):
        reason = model_families.failure(name)
        if name in _REASON:
            assert reason is None or _REASON[name] in reason, name
        if reason is not None:
            assert name in _REASON, (name, reason)
            continue
        model = model_families.made(name)
        heads = [path for path, layer in linears(model) if makes_logits(layer)]
        if not heads:
            without.append(name)
        try:
            report = tritonfp8.convert(model, "rowwise")
        except ValueError as error:
            assert "nothing was converted" in str(error)  # noqa: PT017  convolutions, and a head
            continue
        if found := [path for path in heads if path in report.converted]:
            taken[name] = found
        # Some are of a class that convert takes nowhere.
        reasons = [report.skipped[path] for path in heads if path not in report.converted]
        assert all("output head" in reason or "a subclass of nn.Linear" in reason for reason in reasons), name
    assert taken == {}
    assert task in _FEW or set(without) <= _NO_LINEAR


def test_the_sweep_has_a_class_for_most_families():
    names = {name for task in TASKS for name in model_families.classes(task)}
    assert len(names) - len(_REASON) >= 700
