"""Programmatic dependent launch (sm_90 and later): a kernel may start before the previous kernel of its stream ends.

The GPU schedules its programs while the last programs of the previous kernel still run.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """Call first in a kernel: a DEPENDENT launch waits here until all previous kernels have ended.

    A kernel must not read or write memory before, because the previous kernel may still read what this one overwrites.
    No kernel triggers its successor early: on an H200 that made casts and models slower.
    """
    if DEPENDENT:
        gdc_wait()
