"""GEMMs on FP8 operands: scales in the epilogue, scales along K, and the warp-specialized kernel for Hopper."""
