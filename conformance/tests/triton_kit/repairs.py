"""Everything that the kit repairs: a kernel, its inputs, and what compiled code gives.

Run as a program under ``TRITON_INTERPRET=1`` it says which of these Triton's own interpreter gets right, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True)
class Repair:
    """`prepare` returns the arguments, the named ones, the output among them, and what it must hold."""

    name: str
    kernel: Any
    prepare: Callable[[], tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]]


def agrees(repair: Repair) -> bool:
    """Whether the launch gives the expected bits (any NaN for a NaN)."""
    arguments, named, output, expected = repair.prepare()
    repair.kernel[(1,)](*arguments, **named)
    return same(output, expected)


def same(output: Tensor, expected: Tensor) -> bool:
    if output.dtype.is_floating_point:
        output, expected = output.double(), expected.double()
        return bool(torch.equal(output.nan_to_num(nan=0.125), expected.nan_to_num(nan=0.125))) and bool(
            torch.equal(output.isnan(), expected.isnan())
        )
    return torch.equal(output, expected)


# Kernels


@triton.jit
def cast_kernel(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i).to(o.dtype.element_ty))


@triton.jit
def binary_kernel(x, y, o, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "add":
        r = a + b
    elif OP == "multiply":
        r = a * b
    elif OP == "divide":
        r = a / b
    elif OP == "negate":
        r = -a
    elif OP == "maximum":
        r = tl.maximum(a, b)
    elif OP == "clamp":
        r = tl.clamp(a, tl.minimum(b, 0.0).to(tl.bfloat16), tl.maximum(b, 0.0).to(tl.bfloat16))
    elif OP == "fma":
        r = tl.fma(a, b, a)
    else:
        r = ((a > b) & (a > 0.0)).to(tl.bfloat16)
    tl.store(o + i, r)


@triton.jit
def scale_kernel(x, o, scale, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, (tl.load(x + i) * scale).to(tl.float32))


@triton.jit
def dot_kernel(a, b, c, PRECISION: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision=PRECISION))


@triton.jit
def dot_scaled_kernel(
    a, sa, b, sb, c, FORMAT: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PACK: tl.constexpr, G: tl.constexpr
):
    i = tl.arange(0, N)
    k = tl.arange(0, K // PACK)
    g = tl.arange(0, K // G)
    left = tl.load(a + i[:, None] * (K // PACK) + k[None, :])
    right = tl.load(b + i[None, :] * (K // PACK) + k[:, None])
    if sa is None:
        r = tl.dot_scaled(left, None, FORMAT, right, tl.load(sb + i[:, None] * (K // G) + g[None, :]), FORMAT)
    else:
        left_scale = tl.load(sa + i[:, None] * (K // G) + g[None, :])
        right_scale = tl.load(sb + i[:, None] * (K // G) + g[None, :])
        r = tl.dot_scaled(left, left_scale, FORMAT, right, right_scale, FORMAT)
    tl.store(c + i[:, None] * N + i[None, :], r)


@triton.jit
def reduce_kernel(x, o, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    if OP == "sum":
        tl.store(o, tl.sum(v, 0))
    elif OP == "cumsum":
        tl.store(o + i, tl.cumsum(v, 0))
    elif OP == "cumprod":
        tl.store(o + i, tl.cumprod(v, 0))
    else:
        tl.store(o, tl.reduce(v, 0, tl.standard._elementwise_max))


@triton.jit
def descriptor_kernel(source, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, source.load([8]))


@triton.jit
def undefined_kernel(x, o, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i, mask=i < n))


@triton.jit
def dependent_launch_kernel(x, o, N: tl.constexpr):
    tl.extra.cuda.gdc_wait()
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i))
    tl.extra.cuda.gdc_launch_dependents()


# Inputs


def any_float32(count: int = 4096) -> Tensor:
    """Random bits, and ordinary magnitudes around the range of the 8-bit formats."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (count // 2,), generator=generator, dtype=torch.int64).to(torch.int32)
    powers = torch.randint(-20, 20, (count // 2,), generator=generator)
    ordinary = torch.ldexp(torch.randn(count // 2, generator=generator), powers)
    return torch.cat([bits.view(torch.float32), ordinary])


def normal(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``cvt.rn.satfinite`` gives."""
    return x.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def cast(name: str, x: Tensor, expected: Tensor) -> Repair:
    def prepare() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
        output = torch.empty_like(expected)
        return (x, output), {"N": x.numel()}, output, expected

    return Repair(name, cast_kernel, prepare)


def binary(operation: str, compute: Callable[[Tensor, Tensor], Tensor]) -> Repair:
    def prepare() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
        x, y = normal(256, seed=3).bfloat16(), normal(256, seed=4).bfloat16()
        output = torch.empty_like(x)
        return (x, y, output), {"OP": operation, "N": 256}, output, compute(x.double(), y.double()).to(BF16)

    return Repair(f"bfloat16 {operation}", binary_kernel, prepare)


def reduction(operation: str, x: Tensor, expected: Tensor) -> Repair:
    def prepare() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
        output = torch.empty_like(expected)
        return (x, output), {"OP": operation, "N": x.numel()}, output, expected

    return Repair(f"bfloat16 {operation}", reduce_kernel, prepare)


def _runtime_float() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    x, output = normal(64).bfloat16(), torch.empty(64)
    scale = 0.30000001192092896  # 0.3 in float32
    return (x, output, scale), {"N": 64}, output, x.float() * scale


def _dot_bf16() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    # Small integers: the sum is exact in any order.
    a, b = (torch.randint(-8, 9, (32, 32), generator=torch.Generator().manual_seed(seed)) for seed in (5, 6))
    output = torch.empty(32, 32)
    return (a.bfloat16(), b.bfloat16(), output), {"PRECISION": "tf32", "N": 32}, output, (a @ b).float()


def _dot_tf32() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    # 1 + 2**-11 has more mantissa than tf32: the unit reads 1.
    a, output = torch.full((32, 32), 1 + 2.0**-11), torch.empty(32, 32)
    return (a, a, output), {"PRECISION": "tf32", "N": 32}, output, torch.full((32, 32), 32.0)


def _dot_scaled_e4m3_scales() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    n, k, group = 16, 64, 16
    generator = torch.Generator().manual_seed(7)
    codes = [torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8) for _ in range(2)]
    scales = [
        torch.tensor([0.5, 1.5, 3.0, 6.0])[torch.randint(0, 4, (n, k // group), generator=generator)] for _ in "ab"
    ]
    levels = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = torch.cat([levels, -levels])
    values = [torch.stack([levels[(c & 15).long()], levels[(c >> 4).long()]], -1).reshape(n, k) for c in codes]
    left, right = (v * s.repeat_interleave(group, 1) for v, s in zip(values, scales, strict=True))
    output = torch.empty(n, n)
    arguments = (codes[0], scales[0].to(E4M3), codes[1], scales[1].to(E4M3), output)
    return arguments, {"FORMAT": "e2m1", "N": n, "K": k, "PACK": 2, "G": group}, output, left @ right.T


def _dot_scaled_bf16() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    # 2**100 does not pass through float16.
    n, k = 16, 32
    a, b = torch.full((n, k), 2.0**100).bfloat16(), torch.ones(n, k).bfloat16()
    scales, output = torch.full((n, 1), 127, dtype=torch.uint8), torch.empty(n, n)
    named = {"FORMAT": "bf16", "N": n, "K": k, "PACK": 1, "G": 32}
    return (a, None, b, scales, output), named, output, torch.full((n, n), k * 2.0**100)


def _descriptor_padding() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    x, output = normal(16).bfloat16(), torch.empty(16, dtype=BF16)
    expected = torch.cat([x[8:], torch.full((8,), float("nan"), dtype=BF16)])
    return (TensorDescriptor(x, [16], [1], [16], "nan"), output), {"N": 16}, output, expected


def _undefined_lanes() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    x, output = normal(16), torch.empty(16)
    return (x, output, 10), {"N": 16}, output, torch.cat([x[:10], torch.full((6,), float("nan"))])


def _dependent_launch() -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    x, output = normal(16), torch.empty(16)
    return (x, output), {"N": 16}, output, x


def _sum_by_halves(x: Tensor) -> Tensor:
    while x.numel() > 1:
        x = x[: x.numel() // 2] + x[x.numel() // 2 :]
    return x


def _running(x: Tensor, step: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    rows = [x[0]]
    for value in x[1:]:
        rows.append(step(rows[-1], value))
    return torch.stack(rows)


FLOATS = any_float32()
NOT_NAN = torch.where(FLOATS.isnan(), 1.0, FLOATS)
CODES = torch.arange(256, dtype=torch.uint8)
# Halfway in float32 and beyond it in full: rounding twice goes down, once goes up.
TWICE_INT = torch.tensor([2**24 + 2**16 + 1, 7, -3, 255], dtype=torch.int32)
TWICE_INT_ROUNDED = torch.tensor([2.0**24 + 2**17, 7, -3, 255]).to(BF16)
TWICE_FLOAT = torch.tensor([1 + 2.0**-8 + 2.0**-40, -1.0], dtype=torch.float64)
TWICE_FLOAT_ROUNDED = torch.tensor([1 + 2.0**-7, -1.0]).to(BF16)
OUT_OF_RANGE = torch.tensor([3e9, -3e9, float("nan"), 1.75])
OUT_OF_RANGE_INT = torch.tensor([2**31 - 1, -(2**31), 0, 1], dtype=torch.int32)

REPAIRS = (
    cast("float32 -> bfloat16", FLOATS, FLOATS.to(BF16)),
    cast("float32 -> e4m3", FLOATS, saturated(FLOATS, E4M3)),
    cast("float32 -> e5m2", FLOATS, saturated(FLOATS, E5M2)),
    cast("bfloat16 -> e4m3", NOT_NAN.to(BF16), saturated(NOT_NAN.to(BF16).float(), E4M3)),
    cast("float16 -> e5m2", NOT_NAN.half(), saturated(NOT_NAN.half().float(), E5M2)),
    cast("e4m3 -> float32", CODES.view(E4M3), CODES.view(E4M3).float()),
    cast("int32 -> bfloat16 rounds once", TWICE_INT, TWICE_INT_ROUNDED),
    cast("float64 -> bfloat16 rounds once", TWICE_FLOAT, TWICE_FLOAT_ROUNDED),
    cast("float32 -> int32 out of range", OUT_OF_RANGE, OUT_OF_RANGE_INT),
    binary("add", torch.add),
    binary("multiply", torch.mul),
    binary("divide", torch.div),
    binary("negate", lambda x, y: -x),
    binary("maximum", torch.maximum),
    binary("clamp", lambda x, y: torch.clamp(x, y.clamp(max=0), y.clamp(min=0))),
    binary("fma", lambda x, y: x * y + x),
    binary("compare", lambda x, y: ((x > y) & (x > 0)).double()),
    Repair("a run-time float is float32", scale_kernel, _runtime_float),
    Repair("bfloat16 dot", dot_kernel, _dot_bf16),
    Repair("tf32 dot drops the low bits", dot_kernel, _dot_tf32),
    Repair("dot_scaled with e4m3 scales", dot_scaled_kernel, _dot_scaled_e4m3_scales),
    Repair("dot_scaled of bfloat16", dot_scaled_kernel, _dot_scaled_bf16),
    reduction("sum", normal(64).to(BF16), _sum_by_halves(normal(64).to(BF16))),
    reduction("max", normal(64).to(BF16), normal(64).to(BF16).max().reshape(1)),
    reduction("cumsum", normal(64).to(BF16), _running(normal(64).to(BF16), torch.add)),
    reduction("cumprod", 1 + normal(16).to(BF16) / 8, _running(1 + normal(16).to(BF16) / 8, torch.mul)),
    Repair("a descriptor pads bfloat16 with NaN", descriptor_kernel, _descriptor_padding),
    Repair("undefined lanes are poisoned", undefined_kernel, _undefined_lanes),
    Repair("dependent launch is no work", dependent_launch_kernel, _dependent_launch),
)


def main() -> None:
    answers = {}
    for repair in REPAIRS:
        try:
            answers[repair.name] = "right" if agrees(repair) else "wrong"
        except Exception as error:  # noqa: BLE001  # a refusal is an answer
            answers[repair.name] = f"refuses: {type(error).__name__}"
    print(json.dumps(answers))  # noqa: T201  # the answer


if __name__ == "__main__":
    main()
