"""Benchmarks on several GPUs: tensor parallelism, FSDP2 with the FP8 all-gather, Hugging Face's Trainer."""
