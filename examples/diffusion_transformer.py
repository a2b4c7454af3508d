"""Train a diffusion transformer of diffusers in FP8, with an average of its weights, and sample from the average.

    python examples/diffusion_transformer.py

It learns to draw bars: a class is the place of two bright rows in an image of 8 x 8. Nothing is downloaded. Without a
GPU the reference implementation runs, which has the same numerics and no speed.
"""

import argparse

import torch
from diffusers import DiTTransformer2DModel, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import EMAModel

import tritonfp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, SIZE, CLASSES, TIMES = 16, 8, 4, 10
SIZES = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 32, "in_channels": 1, "out_channels": 1}


def images(labels: torch.Tensor) -> torch.Tensor:
    """Images ``[B, 1, SIZE, SIZE]`` of -1, with two rows of 1 at the place of the class."""
    is_bright = torch.arange(SIZE, device=DEVICE) // 2 == labels[:, None]
    return torch.where(is_bright, 1.0, -1.0)[:, None, :, None].expand(-1, -1, -1, SIZE)


def batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs between images and noise, and what the model should predict: the way from the image to the noise."""
    labels = torch.randint(CLASSES, (BATCH,), device=DEVICE)
    clean, noise = images(labels), torch.randn(BATCH, 1, SIZE, SIZE, device=DEVICE)
    time = torch.rand(BATCH, device=DEVICE)
    noisy = torch.lerp(clean, noise, time[:, None, None, None])
    return {"hidden_states": noisy, "timestep": 1000 * time, "class_labels": labels}, noise - clean


@torch.no_grad()
def sample(model: torch.nn.Module, labels: torch.Tensor) -> torch.Tensor:
    """Images of the classes, from noise."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(TIMES, device=DEVICE)
    x = torch.randn(len(labels), 1, SIZE, SIZE, device=DEVICE)
    for time in scheduler.timesteps:
        velocity = model(x, timestep=time.expand(len(labels)), class_labels=labels).sample
        x = scheduler.step(velocity, time, x).prev_sample
    return x


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="rowwise", choices=tritonfp8.recipes.names())
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = DiTTransformer2DModel(**SIZES, sample_size=SIZE, num_embeds_ada_norm=CLASSES).to(DEVICE)
    # What reads a row an image stays in high precision: timesteps, labels, and the modulation of norms.
    print(tritonfp8.convert(model, options.recipe))
    if DEVICE == "cuda":
        for block in model.transformer_blocks:
            block.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    average = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True)

    losses = []
    for step in range(options.steps):
        inputs, target = batch()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            if step == 0:
                print(tritonfp8.verify(model, **inputs))
            predicted = model(**inputs).sample
        loss = (predicted.float() - target).square().mean()
        loss.backward()
        if step == 0:
            # An error if a weight does not move.
            with tritonfp8.verify_training(model, optimizer) as moved:
                optimizer.step()
            print(moved)
        else:
            optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")

    average.copy_to(model.parameters())
    labels = torch.arange(CLASSES, device=DEVICE)
    error = (sample(model.eval(), labels) - images(labels)).square().mean().item()
    print(f"mean squared error of images that are sampled: {error:.3f}")


if __name__ == "__main__":
    main()
