"""Tiny models of diffusers with random weights, each with the inputs of a step: three images, 7 tokens of text."""

import diffusers
import torch

BATCH = 3
HEADS = {"attention_head_dim": 16, "num_attention_heads": 4}
ONE_OF_EACH = {"num_layers": 1, "num_single_layers": 1}
TIMES = torch.tensor([1.0, 500.0, 900.0])


def _random(*sizes):
    return torch.randn(BATCH, *sizes, generator=torch.Generator().manual_seed(len(sizes)))


def _seeded(cls, **sizes):
    torch.manual_seed(0)
    return cls(**sizes)


def _conditions(pooled=False, guidance=False):
    found = {"encoder_hidden_states": _random(7, 48), "timestep": TIMES / 1000}
    found |= {"pooled_projections": _random(80)} if pooled else {}
    return found | ({"guidance": TIMES} if guidance else {})


def dit():
    model = _seeded(diffusers.DiTTransformer2DModel, **HEADS, out_channels=8, num_layers=2, sample_size=16)
    inputs = {"hidden_states": _random(4, 16, 16), "timestep": TIMES.long(), "class_labels": torch.tensor([1, 2, 3])}
    return model, inputs


def sd3():
    sizes = {"sample_size": 16, "in_channels": 4, "out_channels": 4, "num_layers": 2, "pos_embed_max_size": 16}
    text = {"joint_attention_dim": 48, "caption_projection_dim": 64, "pooled_projection_dim": 80}
    model = _seeded(diffusers.SD3Transformer2DModel, **HEADS, **sizes, **text)
    return model, {"hidden_states": _random(4, 16, 16), **_conditions(pooled=True)}


def flux():
    text = {"joint_attention_dim": 48, "pooled_projection_dim": 80, "guidance_embeds": True}
    axes = {"in_channels": 16, "axes_dims_rope": (4, 4, 8)}
    model = _seeded(diffusers.FluxTransformer2DModel, **HEADS, **ONE_OF_EACH, **text, **axes)
    places = {"img_ids": torch.zeros(24, 3), "txt_ids": torch.zeros(7, 3)}
    return model, {"hidden_states": _random(24, 16), **_conditions(pooled=True, guidance=True), **places}


def flux2():
    text = {"joint_attention_dim": 48, "timestep_guidance_channels": 32}
    axes = {"in_channels": 16, "axes_dims_rope": (4, 4, 4, 4)}
    model = _seeded(diffusers.Flux2Transformer2DModel, **HEADS, **ONE_OF_EACH, **text, **axes)
    places = {"img_ids": torch.zeros(24, 4), "txt_ids": torch.zeros(7, 4)}
    return model, {"hidden_states": _random(24, 16), **_conditions(guidance=True), **places}


def pixart():
    sizes = {"cross_attention_dim": 64, "caption_channels": 48, "sample_size": 16, "num_layers": 1}
    model = _seeded(diffusers.PixArtTransformer2DModel, **HEADS, **sizes, use_additional_conditions=False)
    sizes_of_images = {"resolution": None, "aspect_ratio": None}
    return model, {"hidden_states": _random(4, 16, 16), **_conditions(), "added_cond_kwargs": sizes_of_images}


def qwen():
    sizes = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": 48, "num_layers": 1}
    model = _seeded(diffusers.QwenImageTransformer2DModel, **HEADS, **sizes, axes_dims_rope=(4, 4, 8))
    mask = torch.ones(BATCH, 7, dtype=torch.long)
    places = {"encoder_hidden_states_mask": mask, "img_shapes": [(1, 4, 4)] * BATCH}
    return model, {"hidden_states": _random(16, 16), **_conditions(), **places}


def sana():
    across = {"num_cross_attention_heads": 4, "cross_attention_head_dim": 16, "cross_attention_dim": 64}
    sizes = {"in_channels": 4, "out_channels": 4, "caption_channels": 48, "num_layers": 1, "sample_size": 16}
    model = _seeded(diffusers.SanaTransformer2DModel, **HEADS, **across, **sizes)
    return model, {"hidden_states": _random(4, 16, 16), **_conditions()}


def unet():
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
        "block_out_channels": (32, 64),
    }
    sizes = {"cross_attention_dim": 48, "attention_head_dim": 8, "norm_num_groups": 8, "layers_per_block": 1}
    model = _seeded(diffusers.UNet2DConditionModel, **blocks, **sizes, use_linear_projection=True)
    return model, {"sample": _random(4, 16, 16), **_conditions()}


DIFFUSION = {each.__name__: each for each in (dit, sd3, flux, flux2, pixart, qwen, sana, unet)}
