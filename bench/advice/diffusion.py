"""DiT-XL/2 of diffusers at 512 pixels, as ``tritonfp8 advise --file bench/advice/diffusion.py:build`` builds it."""

from typing import Any

import torch
from torch import nn

LATENT, CHANNELS, CLASSES = 64, 4, 1000


def build(tokens: str, dtype: torch.dtype, device: torch.device) -> tuple[nn.Module, dict[str, Any]]:
    """The model and a batch of ``tokens`` images, 1024 tokens each."""
    from diffusers import DiTTransformer2DModel

    images = int(tokens)
    torch.manual_seed(0)
    with torch.device(device):
        model = DiTTransformer2DModel(sample_size=LATENT, num_layers=28, attention_head_dim=72)
        batch = {
            "hidden_states": torch.randn(images, CHANNELS, LATENT, LATENT, dtype=dtype),
            "timestep": torch.randint(CLASSES, (images,)),
            "class_labels": torch.randint(CLASSES, (images,)),
        }
    return model.to(dtype), batch
