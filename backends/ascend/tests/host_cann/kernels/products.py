"""Matrix products. Accumulation is torch's on the CPU; products of narrow types accumulate in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from host_cann.kernels.registry import KernelTable

TABLE = KernelTable()


def product(x: Tensor, y: Tensor) -> Tensor:
    """Return x @ y, accumulated in float32 where the operands are narrower."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return (x.float() @ y.float()).to(x.dtype)
    return x @ y


def _matmul(x: Tensor, y: Tensor, _cube_math_type: int) -> Tensor:
    return product(x, y)


TABLE.pure("aclnnMatmul(self, other, out*, byte cube_math_type)", _matmul)
TABLE.pure("aclnnMm(self, other, out*, byte cube_math_type)", _matmul)
TABLE.pure("aclnnMv(self, other, out*, byte cube_math_type)", _matmul)
TABLE.pure("aclnnBatchMatMul(self, other, out*, byte cube_math_type)", _matmul)
TABLE.pure("aclnnDot(self, other, out*)", torch.dot)


def _add_product(x: Tensor, first: Tensor, second: Tensor, beta: float, alpha: float, _cube_math_type: int) -> Tensor:
    wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    added = alpha * (first.to(wide) @ second.to(wide))
    return (added if beta == 0 else beta * x.to(wide) + added).to(first.dtype)


TABLE.pure("aclnnAddmm(self, first, second, scalar beta, scalar alpha, out*, byte cube_math_type)", _add_product)
TABLE.pure("aclnnBaddbmm(self, first, second, scalar beta, scalar alpha, out*, byte cube_math_type)", _add_product)
TABLE.pure("aclnnInplaceAddmm(self&, first, second, scalar beta, scalar alpha, byte cube_math_type)", _add_product)
