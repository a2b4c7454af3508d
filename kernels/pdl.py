"""Launches that overlap the end of the one before: programmatic dependent launch, sm_90 and later.

A kernel that is launched so is put on the device while the last programs of the kernel before it in the stream end.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """First in a kernel: wait until all that was launched before has ended, if the launch is a DEPENDENT one.

    Nothing may be read or written earlier: also what a kernel writes may be memory that the one before reads to its
    end. No kernel lets the next one come before its own programs end: on an H200 that made casts and models slower.
    """
    if DEPENDENT:
        gdc_wait()
