"""Correctly rounded root and quotient of the optimizer step, as instructions without a branch for each element.

``sqrt.rn`` and ``div.rn`` of a GPU are an estimate, a few fused steps that round it correctly, and for each element a
branch to a subroutine if a number is so large or small that these steps lose bits. The compiler does not interleave
elements across these branches. Here are the same steps, and one branch for several elements of a thread: if any of them
is out of range, all go through ``sqrt.rn`` and ``div.rn``.
"""

import triton
import triton.language as tl

# Elements of one branch. Eight take fewer instructions, but more registers than the weights of a long row leave.
PACK: tl.constexpr = tl.constexpr(4)
# Squares of [2^-101, 2^80) and means of magnitude [2^-60, 2^30.5) are in range: then the quotient is normal, and so are
# the remainders of the steps. As patterns, and those of means doubled, which leaves out their sign.
LEAST_SQUARE = (127 - 101) << 23
LEAST_MEAN = (127 - 60) << 24
RANGE: tl.constexpr = tl.constexpr(181 << 23)


def _assembly(pack):
    """PTX of ``root = sqrt(v)`` and ``quotient = m / (root * c + eps)`` of so many elements.

    Its registers must not be named as the compiler's (``%r1``, ``%f1``): in the block they would hide the operands.
    """
    operands = ("root", "quotient", "v", "m", "c", "eps", "limit")
    names = [{name: f"${i * pack + at}" for i, name in enumerate(operands)} for at in range(pack)]
    check = (
        # Moved first: an integer instruction takes no register that was declared as a float.
        "mov.b32 %t, {v}; add.u32 %t, %t, -" + str(LEAST_SQUARE) + "; max.u32 %far, %far, %t;"
        "shl.b32 %t, {m}, 1; sub.u32 %t, %t, " + str(LEAST_MEAN) + "; max.u32 %far, %far, %t;"
    )  # fmt: skip
    fast = (
        # One step from an estimate of 1 / sqrt(v) to the root, and two from an estimate of 1 / d to the quotient.
        "rsqrt.approx.ftz.f32 %y, {v}; mul.rn.f32 %g, {v}, %y; mul.rn.f32 %h, %y, 0f3F000000; neg.f32 %n, %g;"
        "fma.rn.f32 %e, %n, %g, {v}; fma.rn.f32 %root@, %e, %h, %g;"
        "mul.rn.f32 %d, %root@, {c}; add.rn.f32 %d, %d, {eps}; neg.f32 %n, %d; rcp.approx.ftz.f32 %y, %d;"
        "fma.rn.f32 %e, %n, %y, 0f3F800000; fma.rn.f32 %y, %y, %e, %y; mul.rn.f32 %g, {m}, %y;"
        "fma.rn.f32 %e, %n, %g, {m}; fma.rn.f32 %quotient@, %e, %y, %g;"
    )
    slow = (
        "sqrt.rn.f32 %root@, {v}; mul.rn.f32 %d, %root@, {c}; add.rn.f32 %d, %d, {eps}; div.rn.f32 %quotient@, {m}, %d;"
    )  # fmt: skip
    last = "mov.f32 {root}, %root@; mov.f32 {quotient}, %quotient@;"

    def each(text):
        return "\n".join(text.replace("@", str(i)).format(**name) for i, name in enumerate(names))

    return f"""{{
        .reg .b32 %t, %far; .reg .f32 %y, %g, %h, %n, %e, %d, %root<{pack}>, %quotient<{pack}>; .reg .pred %near;
        mov.b32 %far, 0;
        {each(check)}
        setp.lt.u32 %near, %far, {names[0]["limit"]};
        {each(fast)}
        @%near bra FOUND;
        {each(slow)}
        FOUND:
        {each(last)}
    }}"""


ASSEMBLY: tl.constexpr = tl.constexpr(_assembly(PACK.value))
CONSTRAINTS: tl.constexpr = tl.constexpr(
    ",".join(["=f"] * (2 * PACK.value) + ["f"] * (4 * PACK.value) + ["r"] * PACK.value)
)


@triton.jit
def root_and_quotient(v, m, c, eps, COMPILED: tl.constexpr):
    """``sqrt(v)`` and ``m / (sqrt(v) * c + eps)``, each operation rounded to nearest; ``c`` and ``eps`` are scalars.

    COMPILED: else it is interpreted, without assembly.
    """
    if COMPILED:
        # From 1 to 2^16, and from 0 to 2^57.
        c_bits, eps_bits = c.to(tl.uint32, bitcast=True), eps.to(tl.uint32, bitcast=True)
        limit = tl.where(c_bits - (127 << 23) <= (16 << 23), tl.where(eps_bits <= ((57 + 127) << 23), RANGE, 0), 0)
        return tl.inline_asm_elementwise(
            ASSEMBLY, CONSTRAINTS, [v, m, c, eps, limit], dtype=(tl.float32, tl.float32), is_pure=True, pack=PACK
        )
    else:
        root = tl.sqrt_rn(v)
        return root, tl.div_rn(m, root * c + eps)
