"""The interpreter's builder that also watches memory: where pointers come from, and what masked lanes hold."""

# ruff: noqa: D102  # the methods are Triton's, and so are their contracts

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from deepinfer_conformance.triton_cpu.arithmetic import ArithmeticBuilder, Handle
from deepinfer_conformance.triton_cpu.bounds import Operand, Place, check_access, operand_behind
from deepinfer_conformance.triton_cpu.formats import Array, small_float_of


def undefined_value(dtype: tl.dtype) -> float | int | bool:
    """What a lane holds that the language leaves undefined: NaN, or a large number that is no good index."""
    small = small_float_of(dtype)
    if small is not None:
        return small.nan_code
    if dtype.is_ptr() or dtype.is_int():
        bits = 64 if dtype.is_ptr() else dtype.int_bitwidth
        return True if bits == 1 else int.from_bytes(b"\x5a" * (bits // 8), "little")
    return float("nan")


class DescriptorHandle(interpreter.TensorDescHandle):  # type: ignore[misc]  # Triton ships no types
    """A tensor descriptor whose pointers still know the argument they come from."""

    def materialize_pointers(self, offsets: list[Handle]) -> tuple[Handle, Handle]:
        pointers, mask = super().materialize_pointers(offsets)
        return _carry(pointers, self.base), mask


def _carry(result: Handle, *sources: Handle) -> Handle:
    """Note on a pointer where it comes from, if all its sources agree."""
    operands = {operand_behind(source) for source in sources}
    if len(operands) == 1:
        found = operands.pop()
        if found is not None:
            result.set_attr("operand", found)
    return result


class CheckedBuilder(ArithmeticBuilder):
    """Checks every access of a launch; `begin` tells it which."""

    def __init__(self, *, poison_undefined: bool) -> None:
        super().__init__()
        self._poison_undefined = poison_undefined
        self._kernel = ""
        self._operands: Sequence[Operand] = ()

    def begin(self, kernel: str, operands: Sequence[Operand]) -> None:
        """Name the launch that follows, and the memory that it was given."""
        self._kernel = kernel
        self._operands = operands

    def _check(self, access: str, pointers: Handle, mask: Handle | None) -> None:
        element_bytes = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        place = Place(self._kernel, self.grid_idx, access)
        lanes = None if mask is None else mask.data
        check_access(place, pointers.data, lanes, element_bytes, operand_behind(pointers), self._operands)

    # Accesses. create_load, create_store and the atomic load and store end in the masked two.

    def create_masked_load(
        self, ptrs: Handle, mask: Handle, other: Handle | None, cache_policy: Any, is_volatile: Any
    ) -> Handle:
        self._check("load", ptrs, mask)
        result = super().create_masked_load(ptrs, mask, other, cache_policy, is_volatile)
        if other is None and self._poison_undefined and not np.all(mask.data):
            hidden = np.broadcast_to(mask.data, result.data.shape) == 0
            undefined = np.asarray(undefined_value(ptrs.get_element_ty())).astype(result.data.dtype)
            result = interpreter.TensorHandle(np.where(hidden, undefined, result.data), result.dtype)
        return result

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, cache_policy: Any) -> Any:
        self._check("store", ptrs, mask)
        return super().create_masked_store(ptrs, value, mask, cache_policy)

    def create_atomic_cas(self, ptr: Handle, cmp: Handle, val: Handle, sem: Any, scope: Any) -> Handle:
        self._check("atomic_cas", ptr, None)
        return super().create_atomic_cas(ptr, cmp, val, sem, scope)

    def create_atomic_rmw(self, rmwOp: Any, ptr: Handle, val: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        self._check(f"atomic {str(rmwOp).rsplit('.', 1)[-1].lower()}", ptr, mask)
        return super().create_atomic_rmw(rmwOp, ptr, val, mask, sem, scope)

    # Descriptors: stock pads small floats with a NaN cast to an integer.

    def create_make_tensor_descriptor(
        self,
        base: Handle,
        shape: list[Handle],
        strides: list[Handle],
        tensor_shape: list[int],
        is_signed: Any,  # noqa: ARG002  # Triton's signature
        padding: Any = "zero",
    ) -> DescriptorHandle:
        handle = DescriptorHandle(base, shape, strides, tensor_shape, padding)
        handle.validate()
        return handle

    def create_descriptor_load(self, desc: Any, indices: list[Handle], cache_policy: Any) -> Handle:
        element = desc.base.dtype.element_ty
        small = small_float_of(element)
        if small is None or desc.padding != interpreter._ir.PADDING_OPTION.PAD_NAN:
            return super().create_descriptor_load(desc, indices, cache_policy)
        pointers, mask = desc.materialize_pointers(indices)
        other = interpreter.TensorHandle(np.full(pointers.data.shape, small.nan_code, small.code_dtype), element)
        return self.create_masked_load(pointers, mask, other, cache_policy, is_volatile=False)

    # Pointers keep their origin through everything that only moves them.

    def create_addptr(self, ptr: Handle, offset: Handle) -> Handle:
        return _carry(super().create_addptr(ptr, offset), ptr)

    def create_splat(self, ret_ty: Any, arg: Handle) -> Handle:
        return _carry(super().create_splat(ret_ty, arg), arg)

    def create_unsplat(self, arg: Handle) -> Handle:
        return _carry(super().create_unsplat(arg), arg)

    def create_broadcast(self, arg: Handle, shape: Any) -> Handle:
        return _carry(super().create_broadcast(arg, shape), arg)

    def create_expand_dims(self, arg: Handle, axis: int) -> Handle:
        return _carry(super().create_expand_dims(arg, axis), arg)

    def create_reshape(self, arg: Handle, shape: Any, allow_reorder: Any) -> Handle:  # noqa: ARG002  # Triton's signature
        data: Array = arg.data.reshape(shape)
        return _carry(interpreter.TensorHandle(data, arg.dtype.scalar), arg)

    def create_trans(self, arg: Handle, perm: Any) -> Handle:
        return _carry(super().create_trans(arg, perm), arg)

    def create_bitcast(self, src: Handle, dst_type: tl.dtype) -> Handle:
        return _carry(super().create_bitcast(src, dst_type), src)

    def create_select(self, cond: Handle, lhs: Handle, rhs: Handle) -> Handle:
        return _carry(self.ternary_op(cond, lhs, rhs, np.where), lhs, rhs)
