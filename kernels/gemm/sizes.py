"""Sizes that the Hopper kernel fixes and that the host needs to choose its tiles."""

# Output rows of one wgmma instruction of a warp group.
SPECIALIZED_WAVE_ROWS = 64
# TMA needs shared memory aligned to 128 bytes: at least 32 float32 scales a buffer.
SCALE_VECTOR = 32
