"""Sizes that the Hopper kernel fixes, for the kernel and for the host that chooses its tiles."""

# Rows of the output that a group of warps multiplies at a time.
SPECIALIZED_WAVE_ROWS = 64
# TMA writes to multiples of 128 bytes of shared memory: that many float32 scales at least.
SCALE_VECTOR = 32
