"""GEMMs on quantized operands: the choice of a kernel and its plan.

operands   of a GEMM, dense or of groups, and what their layouts allow
dense      one GEMM
grouped    a GEMM for each group
widened    MX operands where no tensor core takes them, dequantized to bf16 first
packed     one GEMM whose weight has codes of 4 bits
by_torch   sums over the tokens of groups in bf16

Exports the Triton twin of each op, and how it runs.
"""

from tritonfp8.launch.gemms.dense import MX_SPECS, has_tma_layout, product_kind, scaled_matmul
from tritonfp8.launch.gemms.grouped import grouped_matmul, grouped_product_kind, scaled_grouped_matmul
from tritonfp8.launch.gemms.packed import packed_grouped_matmul, packed_matmul
