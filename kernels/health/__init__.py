"""The figures of operands: how large they are, and what their quantization loses."""
