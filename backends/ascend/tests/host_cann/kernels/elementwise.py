"""Operators whose every result depends on one element of each operand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from host_cann.errors import KernelError
from host_cann.kernels.registry import KernelTable
from host_cann.views import store

TABLE = KernelTable()

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Asin": torch.asin, "Atan": torch.atan, "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil, "Cos": torch.cos, "Cosh": torch.cosh, "Erf": torch.erf, "Erfc": torch.erfc, "Exp": torch.exp,
    "Exp2": torch.exp2, "Expm1": torch.expm1, "Floor": torch.floor, "Frac": torch.frac, "IsFinite": torch.isfinite,
    "IsInf": torch.isinf, "IsNegInf": torch.isneginf, "IsPosInf": torch.isposinf, "Log": torch.log,
    "Log10": torch.log10, "Log1p": torch.log1p, "Log2": torch.log2, "LogicalNot": torch.logical_not, "Neg": torch.neg,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Rsqrt": torch.rsqrt,
    "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Signbit": torch.signbit, "Silu": F.silu, "Sin": torch.sin,
    "Sinh": torch.sinh, "Sqrt": torch.sqrt, "Square": torch.square, "Tan": torch.tan, "Tanh": torch.tanh,
    "Trunc": torch.trunc, "Mish": F.mish, "Gelu": F.gelu,
}  # fmt: skip
for _name, _function in UNARY.items():
    TABLE.pure(f"aclnn{_name}(self, out*)", _function)
for _name in (
    "Abs", "Ceil", "Cos", "Exp", "Floor", "Log", "LogicalNot", "Neg", "Reciprocal", "Relu", "Round", "Rsqrt",
    "Sigmoid", "Sin", "Sqrt", "Tanh", "Trunc", "Exp2", "Log2", "Expm1", "Log1p", "Erf",
):  # fmt: skip
    TABLE.pure(f"aclnnInplace{_name}(self&)", UNARY[_name])

BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Atan2": torch.atan2, "BitwiseAndTensor": torch.bitwise_and, "BitwiseOrTensor": torch.bitwise_or,
    "BitwiseXorTensor": torch.bitwise_xor, "Div": torch.true_divide, "EqTensor": torch.eq,
    "FloorDivide": torch.floor_divide, "FmodTensor": torch.fmod, "GeTensor": torch.ge, "GtTensor": torch.gt,
    "LeTensor": torch.le, "LeftShift": torch.bitwise_left_shift, "LogAddExp": torch.logaddexp,
    "LogAddExp2": torch.logaddexp2, "LogicalAnd": torch.logical_and, "LogicalOr": torch.logical_or,
    "LogicalXor": torch.logical_xor, "LtTensor": torch.lt, "Maximum": torch.maximum, "Minimum": torch.minimum,
    "Mul": torch.mul, "NeTensor": torch.ne, "PowTensorTensor": torch.pow,
    "RemainderTensorTensor": torch.remainder, "RightShift": torch.bitwise_right_shift,
}  # fmt: skip
for _name, _binary in BINARY.items():
    TABLE.pure(f"aclnn{_name}(self, other, out*)", _binary)
for _name in (
    "BitwiseAndTensor", "BitwiseOrTensor", "BitwiseXorTensor", "Div", "EqTensor", "FloorDivide", "FmodTensor",
    "GeTensor", "GtTensor", "LeTensor", "LogicalAnd", "LogicalOr", "LtTensor", "Mul", "NeTensor", "PowTensorTensor",
    "RemainderTensorTensor",
):  # fmt: skip
    TABLE.pure(f"aclnnInplace{_name}(self&, other)", BINARY[_name])

WITH_SCALAR: dict[str, Callable[..., Tensor]] = {
    "BitwiseAndScalar": torch.bitwise_and, "BitwiseOrScalar": torch.bitwise_or, "BitwiseXorScalar": torch.bitwise_xor,
    "Divs": torch.true_divide, "EqScalar": torch.eq, "FloorDivides": torch.floor_divide, "FmodScalar": torch.fmod,
    "GeScalar": torch.ge, "GtScalar": torch.gt, "LeScalar": torch.le, "LeftShifts": torch.bitwise_left_shift,
    "LtScalar": torch.lt, "Muls": torch.mul, "NeScalar": torch.ne, "PowTensorScalar": torch.pow,
    "RemainderTensorScalar": torch.remainder, "ClampMin": torch.clamp_min, "ClampMax": torch.clamp_max,
}  # fmt: skip
for _name, _with_scalar in WITH_SCALAR.items():
    TABLE.pure(f"aclnn{_name}(self, scalar other, out*)", _with_scalar)
for _name in (
    "BitwiseAndScalar", "BitwiseOrScalar", "BitwiseXorScalar", "Divs", "EqScalar", "FloorDivides", "FmodScalar",
    "GeScalar", "GtScalar", "LeScalar", "LtScalar", "Muls", "NeScalar", "PowTensorScalar", "RemainderTensorScalar",
    "ClampMin", "ClampMax",
):  # fmt: skip
    TABLE.pure(f"aclnnInplace{_name}(self&, scalar other)", WITH_SCALAR[_name])
TABLE.pure("aclnnPowScalarTensor(scalar self, exponent, out*)", torch.pow)
TABLE.pure("aclnnRemainderScalarTensor(scalar self, other, out*)", torch.remainder)


def _add(x: Tensor, other: Tensor, alpha: float) -> Tensor:
    return torch.add(x, other, alpha=alpha)


def _subtract(x: Tensor, other: Tensor, alpha: float) -> Tensor:
    return torch.sub(x, other, alpha=alpha)


def _reverse_subtract(x: Tensor, other: Tensor, alpha: float) -> Tensor:
    return torch.rsub(x, other, alpha=alpha)


for _name, _linear in (("Add", _add), ("Sub", _subtract), ("Rsub", _reverse_subtract)):
    TABLE.pure(f"aclnn{_name}(self, other, scalar alpha, out*)", _linear)
    TABLE.pure(f"aclnn{_name}s(self, scalar other, scalar alpha, out*)", _linear)
    if _name != "Rsub":
        TABLE.pure(f"aclnnInplace{_name}(self&, other, scalar alpha)", _linear)
        TABLE.pure(f"aclnnInplace{_name}s(self&, scalar other, scalar alpha)", _linear)

TABLE.pure("aclnnClamp(self, scalar least?, scalar most?, out*)", torch.clamp)
TABLE.pure("aclnnClampTensor(self, least?, most?, out*)", torch.clamp)
TABLE.pure("aclnnClampMinTensor(self, least, out*)", torch.maximum)
TABLE.pure("aclnnClampMaxTensor(self, most, out*)", torch.minimum)
TABLE.pure("aclnnHardtanh(self, scalar least, scalar most, out*)", torch.clamp)
TABLE.pure("aclnnSWhere(condition, self, other, out*)", torch.where)
TABLE.pure("aclnnInplaceMaskedFillScalar(self&, mask, scalar value)", torch.masked_fill)
TABLE.pure("aclnnInplaceMaskedFillTensor(self&, mask, value)", torch.masked_fill)
TABLE.pure("aclnnSoftplus(self, scalar beta, scalar threshold, out*)", F.softplus)
TABLE.pure("aclnnLogSigmoid(self, out*)", F.logsigmoid)
TABLE.pure("aclnnIsClose(self, other, double rtol, double atol, bool equal_nan, out*)", torch.isclose)
TABLE.pure("aclnnNanToNum(self, float nan, float positive, float negative, out*)", torch.nan_to_num)
TABLE.pure("aclnnLerp(self, end, weight, out*)", torch.lerp)
TABLE.pure("aclnnLerps(self, end, scalar weight, out*)", torch.lerp)
TABLE.pure("aclnnGlu(self, int dim, out*)", F.glu)


def _gelu(x: Tensor, approximate: int) -> Tensor:
    return F.gelu(x, approximate="tanh" if approximate else "none")


TABLE.pure("aclnnGeluV2(self, int approximate, out*)", _gelu)


@TABLE.add("aclnnLogSigmoidForward(self, out*, buffer*)")
def log_sigmoid(self: Tensor, out: Tensor, buffer: Tensor) -> None:
    store(out, F.logsigmoid(self))


def _add_product(x: Tensor, first: Tensor, second: Tensor, value: float) -> Tensor:
    return torch.addcmul(x, first, second, value=value)


def _add_quotient(x: Tensor, first: Tensor, second: Tensor, value: float) -> Tensor:
    return torch.addcdiv(x, first, second, value=value)


TABLE.pure("aclnnAddcmul(self, first, second, scalar value, out*)", _add_product)
TABLE.pure("aclnnInplaceAddcmul(self&, first, second, scalar value)", _add_product)
TABLE.pure("aclnnAddcdiv(self, first, second, scalar value, out*)", _add_quotient)
TABLE.pure("aclnnInplaceAddcdiv(self&, first, second, scalar value)", _add_quotient)

_ROUNDING = {0: None, 1: "trunc", 2: "floor"}


def _divide(x: Tensor, other: Tensor, mode: int) -> Tensor:
    if mode not in _ROUNDING:
        raise KernelError(f"has no rounding mode {mode}; known are {_ROUNDING}")
    return torch.div(x, other, rounding_mode=_ROUNDING[mode])


TABLE.pure("aclnnDivMod(self, other, int32 mode, out*)", _divide)
TABLE.pure("aclnnDivMods(self, scalar other, int32 mode, out*)", _divide)
TABLE.pure("aclnnInplaceDivMod(self&, other, int32 mode)", _divide)
TABLE.pure("aclnnInplaceDivMods(self&, scalar other, int32 mode)", _divide)


# ---- copies and fills
@TABLE.add("aclnnInplaceCopy(self*, source)")
def copy(self: Tensor, source: Tensor) -> None:
    self.copy_(source)


@TABLE.add("aclnnCast(self, int dtype, out*)")
def cast(self: Tensor, dtype: int, out: Tensor) -> None:
    store(out, self.to(out.dtype))


@TABLE.add("aclnnInplaceFillScalar(self*, scalar value)")
def fill(self: Tensor, value: float) -> None:
    self.fill_(value)


@TABLE.add("aclnnInplaceFillTensor(self*, value)")
def fill_with_tensor(self: Tensor, value: Tensor) -> None:
    self.copy_(value.expand(self.shape))


@TABLE.add("aclnnInplaceZero(self*)")
def zero(self: Tensor) -> None:
    self.zero_()


@TABLE.add("aclnnInplaceOne(self*)")
def one(self: Tensor) -> None:
    self.fill_(1)
