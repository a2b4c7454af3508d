"""Casts: quantize, dequantize, transpose, and the amax of blocks; one tensor, or many shards at once."""
