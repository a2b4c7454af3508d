"""Train a vision transformer of transformers in FP8 to tell stripes apart, then classify with weights in 8 bits.

    python examples/vision_transformer.py

An image of 112 x 112 has 49 patches and a token for its class, so layers read 50 rows an image, which is no multiple of
16. A class is the angle and the width of stripes. Nothing is downloaded. Without a GPU the reference implementation
runs, which has the same numerics and no speed.
"""

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

import tritonfp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, SIZE, CLASSES = 16, 112, 16
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def batch() -> dict[str, torch.Tensor]:
    """Images ``[B, 3, SIZE, SIZE]`` of stripes with noise, and their classes."""
    labels = torch.randint(CLASSES, (BATCH,), device=DEVICE)
    angles, widths = (labels % 4) * torch.pi / 4, 8 + 8 * (labels // 4)
    places = torch.arange(SIZE, device=DEVICE)
    along = places * angles.cos()[:, None, None] + places[:, None] * angles.sin()[:, None, None]
    stripes = torch.sin(2 * torch.pi * along / widths[:, None, None])
    noise = 0.1 * torch.randn(BATCH, 3, SIZE, SIZE, device=DEVICE)
    return {"pixel_values": stripes[:, None] + noise, "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="rowwise", choices=tritonfp8.recipes.names())
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = ViTConfig(**SIZES, image_size=SIZE, patch_size=16, num_labels=CLASSES)
    model = ViTForImageClassification(config).to(DEVICE)
    # The classifier and the convolution that embeds patches stay in high precision.
    print(tritonfp8.convert(model, options.recipe))
    if DEVICE == "cuda":
        for layer in model.vit.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    losses = []
    for step in range(options.steps):
        inputs = batch()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            if step == 0:
                print(tritonfp8.verify(model, **inputs))
            loss = model(**inputs).loss
        loss.backward()
        if step == 0:
            # An error if a weight does not move.
            with tritonfp8.verify_training(model, optimizer) as moved:
                optimizer.step()
            print(moved)
        else:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} at the first step, {losses[-1]:.3f} at the last")

    if options.recipe != "bf16":
        print(repr(tritonfp8.convert(model.eval(), options.recipe, mode="inference")))
    inputs = batch()
    with torch.no_grad():
        right = model(**inputs).logits.argmax(1) == inputs["labels"]
    print(f"classified: {int(right.sum())} of {BATCH} new images are right")


if __name__ == "__main__":
    main()
