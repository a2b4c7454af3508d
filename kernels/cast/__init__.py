"""Casts: quantize, dequantize, transpose, the amax of blocks; one tensor, groups of rows, or many shards at once."""
