"""How FP8 training works: a rowwise linear layer, built step by step from the public functions of tritonfp8.

    python examples/teach.py

Read it from top to bottom: each step is a function that first explains, then computes, then prints what came out and
checks it. The last step compares our layer with the one that ``tritonfp8.convert`` makes: they have the same bits.
Without a GPU the reference implementation runs, which has the same numerics and no speed.

1. A code and a scale       one row in 8 bits, by hand
2. A cast                   the same for a matrix, by tritonfp8.quantize
3. A product                codes times codes, by tritonfp8.scaled_matmul
4. Three products           why each tensor is quantized twice
5. A layer                  an autograd function and a module
6. The same bits            our layer beside tritonfp8.convert
7. Training                 our layer beside bf16
"""

import torch
from torch import Tensor, nn

import tritonfp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# e4m3: a sign, 4 bits of exponent, 3 of fraction. Its largest value is 448, so its codes need a scale.
LARGEST = 448.0
NAMES = ("output", "grad_input", "grad_weight")
# How one tensor becomes 8 bits. A block (1, -1) is one row and all of its columns, so each row has a scale of its own.
ROW_BY_ROW = tritonfp8.QuantSpec(format="e4m3", block=(1, -1), scale_format="fp32", scale_rounding="pow2")


def step(title: str) -> None:
    print(f"\n{title}\n{'-' * len(title)}")


def relative_error(found: Tensor, right: Tensor) -> float:
    """The norm of the difference over the norm of what is right."""
    return ((found.float() - right.float()).norm() / right.float().norm()).item()


def by_hand(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of the rows of ``x [M, K]``: float8 ``[M, K]`` and float32 ``[M, 1]``.

    The largest magnitude of a row, its *amax*, should become the largest code. The factor that does this is rounded
    down to a power of two. Two things follow: no value of the row exceeds the largest code, and a multiplication by a
    factor or a scale is exact, so that the codes have the only rounding error.
    """
    amax = x.float().abs().amax(dim=1, keepdim=True)
    factor = torch.exp2(torch.floor(torch.log2(LARGEST / amax)))
    codes = (x.float() * factor).to(torch.float8_e4m3fn)
    # A scale turns codes back into values: value = code * scale.
    return codes, 1 / factor


def a_code_and_a_scale() -> None:
    step("1. A code and a scale")
    row = torch.tensor([[0.03, -1.7, 0.5, 6.1]])
    codes, scale = by_hand(row)
    values = codes.float() * scale
    print(f"values    {', '.join(f'{each:.4f}' for each in row[0])}")
    print(
        f"codes     {', '.join(f'{each:g}' for each in codes.float()[0])}; each is a byte; the scale is {scale.item()}"
    )
    print(f"come back {', '.join(f'{each:.4f}' for each in values[0])}")
    # Three bits of fraction: neighbours are 1/8 of a power of two apart, and rounding is off by half of that at most.
    assert ((values - row).abs() <= row.abs() / 16).all()


def a_cast(x: Tensor) -> None:
    step("2. A cast")
    codes, scale = by_hand(x)
    found = tritonfp8.quantize(x, ROW_BY_ROW)
    assert torch.equal(found.qdata.view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(found.scale, scale)
    print(f"{found}: codes and scales equal the codes and scales by hand")
    print(f"error of the values that come back: {relative_error(tritonfp8.dequantize(found), x):.4f}")


def a_product(x: Tensor, weight: Tensor) -> None:
    """``x [M, K] @ weight [N, K].T``: both operands lie along K, over which the product adds.

    Element (m, n) is the sum over K of codes of row m times codes of row n. All terms have the same two scales, of
    row m and of row n. So the tensor cores add codes, and the scales are multiplied once, after the sum. A scale for
    each column would be another one for each term: it could not be taken out of the sum.
    """
    step("3. A product")
    a, b = tritonfp8.quantize(x, ROW_BY_ROW), tritonfp8.quantize(weight, ROW_BY_ROW)
    sums = a.qdata.double() @ b.qdata.double().T
    by_scales = sums * a.scale * b.scale.T
    found = tritonfp8.scaled_matmul(a, b, out_dtype=torch.float32)
    print(f"against sums of codes in float64, times the scales: {relative_error(found, by_scales):.1e}")
    print(f"against the product in high precision: {relative_error(found, x.float() @ weight.float().T):.4f}")
    # FP8 tensor cores keep about 14 bits of a sum, for at most 128 terms; then it is added in float32.
    assert relative_error(found, by_scales) < 2**-12


def three_products(x: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The output of a linear layer, and its two gradients, each by one product of codes.

        output      = input @ weight.T           adds over K
        grad_input  = grad_output @ weight       adds over N
        grad_weight = grad_output.T @ input      adds over M

    Each tensor is in two products, which add over different dims. Scales must lie along the dim of the sum (step 3),
    and so must the bytes. So each tensor is quantized twice, row by row: as it is, and transposed. ``quantize_both``
    does both in one pass over the tensor.
    """
    input_, input_t = tritonfp8.quantize_both(x, ROW_BY_ROW, ROW_BY_ROW)
    weight_, weight_t = tritonfp8.quantize_both(weight, ROW_BY_ROW, ROW_BY_ROW)
    grad, grad_t = tritonfp8.quantize_both(grad_output, ROW_BY_ROW, ROW_BY_ROW)
    output = tritonfp8.scaled_matmul(input_, weight_, out_dtype=x.dtype)
    grad_input = tritonfp8.scaled_matmul(grad, weight_t, out_dtype=x.dtype)
    grad_weight = tritonfp8.scaled_matmul(grad_t, input_t, out_dtype=weight.dtype)
    return output, grad_input, grad_weight


def show_three_products(x: Tensor, weight: Tensor, grad_output: Tensor) -> None:
    step("4. Three products")
    right = (x @ weight.T, grad_output @ weight, grad_output.T @ x)
    for name, found, expected in zip(NAMES, three_products(x, weight, grad_output), right, strict=True):
        print(f"{name:12} {list(found.shape)!s:12} error {relative_error(found, expected):.4f}")


class RowwiseFunction(torch.autograd.Function):
    """A linear layer in FP8. Forward saves codes, which are half the size of the bf16 tensors that nn.Linear saves."""

    @staticmethod
    def forward(ctx, x, weight):
        input_, input_t = tritonfp8.quantize_both(x, ROW_BY_ROW, ROW_BY_ROW)
        weight_, weight_t = tritonfp8.quantize_both(weight, ROW_BY_ROW, ROW_BY_ROW)
        ctx.saved = input_t, weight_t, x.dtype, weight.dtype
        return tritonfp8.scaled_matmul(input_, weight_, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        input_t, weight_t, input_dtype, weight_dtype = ctx.saved
        grad, grad_t = tritonfp8.quantize_both(grad_output, ROW_BY_ROW, ROW_BY_ROW)
        grad_input = tritonfp8.scaled_matmul(grad, weight_t, out_dtype=input_dtype)
        return grad_input, tritonfp8.scaled_matmul(grad_t, input_t, out_dtype=weight_dtype)


class RowwiseLinear(nn.Linear):
    """``nn.Linear`` without bias, in FP8. Its parameter stays in high precision, for the small steps of optimizers."""

    def forward(self, x: Tensor) -> Tensor:
        rows = RowwiseFunction.apply(x.flatten(end_dim=-2), self.weight)
        return rows.unflatten(0, x.shape[:-1])


def the_same_bits(x: Tensor, weight: Tensor, grad_output: Tensor) -> None:
    step("5, 6. A layer, and the same bits")
    results = []
    for make in (RowwiseLinear, nn.Linear):
        layer = make(weight.shape[1], weight.shape[0], bias=False, device=DEVICE, dtype=weight.dtype)
        layer.weight.data.copy_(weight)
        if make is nn.Linear:
            tritonfp8.convert(layer, "rowwise")
        leaf = x.clone().requires_grad_()
        output = layer(leaf)
        output.backward(grad_output)
        results.append((output, leaf.grad, layer.weight.grad))
    for name, ours, converted in zip(NAMES, *results, strict=True):
        assert torch.equal(ours, converted), f"{name} differs"
        print(f"{name:12} equals the {name} of tritonfp8.convert to the bit")


def training() -> None:
    """A small network learns a function of another one, by bf16 layers and by ours, from the same weights and data."""
    step("7. Training")
    for name, make in (("bf16", nn.Linear), ("rowwise", RowwiseLinear)):
        torch.manual_seed(0)
        options = {"bias": False, "device": DEVICE, "dtype": torch.bfloat16}
        teacher = nn.Sequential(nn.Linear(64, 256, **options), nn.Tanh(), nn.Linear(256, 64, **options))
        model = nn.Sequential(make(64, 256, **options), nn.Tanh(), make(256, 64, **options))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(60):
            x = torch.randn(256, 64, device=DEVICE, dtype=torch.bfloat16)
            loss = (model(x) - teacher(x).detach()).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        print(f"{name:8} loss: {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last")


def main() -> None:
    torch.manual_seed(0)
    options = {"device": DEVICE, "dtype": torch.bfloat16}
    # Tokens, in features and out features.
    m, k, n = 128, 256, 192
    x, weight, grad_output = torch.randn(m, k, **options), torch.randn(n, k, **options), torch.randn(m, n, **options)
    # One row with large values: they take no precision from the other rows, as a scale for all of the tensor would.
    x[0] *= 1000
    a_code_and_a_scale()
    a_cast(x)
    a_product(x, weight)
    show_three_products(x, weight, grad_output)
    the_same_bits(x, weight, grad_output)
    training()


if __name__ == "__main__":
    main()
