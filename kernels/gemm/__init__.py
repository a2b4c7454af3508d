"""GEMMs on FP8 operands: scales in the epilogue, scales along K, and warp-specialized kernels for Hopper."""
