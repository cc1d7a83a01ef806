"""Kernels that are compiled for real GPUs: good ones, and one for each fault."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_kernel(x, y, o, n, N: tl.constexpr, TYPE: tl.constexpr = tl.float32):
    i = tl.program_id(0) * N + tl.arange(0, N)
    value = tl.load(x + i, mask=i < n).to(TYPE) + tl.load(y + i, mask=i < n).to(TYPE)
    tl.store(o + i, value, mask=i < n)


@triton.jit
def matmul_kernel(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = tl.load(a + m[:, None] * K + start + k[None, :])
        right = tl.load(b + n[None, :] * K + start + k[:, None])
        total = tl.dot(left, right, total)
    tl.store(c + m[:, None] * BN + n[None, :], total)


@triton.jit
def softmax_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    e = tl.exp(v - tl.max(v, 0))
    tl.store(o + i, e / tl.sum(e, 0))


@triton.jit
def small_float_sum_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i) + tl.load(x + i))
