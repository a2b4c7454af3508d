"""Whole models trained by torchtitan's Trainer."""
