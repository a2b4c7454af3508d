"""Triton kernels. A checkout keeps their sources in the top-level ``kernels/`` folder."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "kernels")]
