"""peft on a fused model computes what it does on the converted model, to the bit, or fails at once."""

import peft
import pytest
import torch
from cases import llama, tokens

from tritonfp8 import convert, revert

LORA = {"r": 4, "init_lora_weights": False}
CONFIGS = {
    "attention": peft.LoraConfig(target_modules=["q_proj"], **LORA),
    "everything": peft.LoraConfig(target_modules="all-linear", **LORA),
    "dora": peft.LoraConfig(target_modules=["gate_proj"], use_dora=True, **LORA),
    "norm": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm"], **LORA),
    "mlp": peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["mlp"], **LORA),
    "norms": peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
    "scales": peft.IA3Config(target_modules=["up_proj"], feedforward_modules=[], init_ia3_weights=False),
}


def adapted(config, fuse):
    model = llama(num_hidden_layers=1)
    report = convert(model, "rowwise", fuse=fuse)
    assert bool(report.fused) == fuse
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


def step(model):
    loss = model(input_ids=tokens(), labels=tokens()).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss, trained)]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_training_and_merging(config):
    fused, plain = (adapted(config, fuse) for fuse in (True, False))
    assert all(map(torch.equal, step(fused), step(plain)))
    merged, expected = (
        model.merge_and_unload()(input_ids=tokens(), labels=tokens()).loss.detach() for model in (fused, plain)
    )
    assert torch.equal(merged, expected)
    assert revert(fused)


@pytest.mark.parametrize(("name", "cls"), [("mlp", "Float8SwiGLU"), ("input_layernorm", "Float8RMSNorm")])
def test_an_adapter_on_a_fused_module_itself_is_refused(name, cls):
    with pytest.raises(ValueError, match=rf"(?s)Target module {cls}\(.*is not supported"):
        adapted(peft.LoraConfig(target_modules=[name]), fuse=True)
