"""The digest of a case's inputs, so that a result says exactly what it was computed from."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping

import torch

from deepinfer_conformance.data.call import OpCall, Recipe


def input_sha256(call: OpCall) -> str:
    """Return the SHA-256 of op, names, shapes, strides, dtypes and bytes of a call, in hexadecimal."""
    digest = hashlib.sha256(call.op.encode())
    _add(digest, call.arguments)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, value: object) -> None:
    match value:
        case torch.Tensor():
            _add_tensor(digest, value)
        case Recipe():
            digest.update(value.op.encode())
            _add(digest, value.arguments)
        case Mapping():
            for key, item in value.items():
                digest.update(f"{key}=".encode())
                _add(digest, item)
        case list() | tuple():
            digest.update(f"[{len(value)}]".encode())
            for item in value:
                _add(digest, item)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            digest.update(type(value).__name__.encode())
            for field in dataclasses.fields(value):
                digest.update(f".{field.name}=".encode())
                _add(digest, getattr(value, field.name))
        case _:
            digest.update(repr(value).encode())


def _add_tensor(digest: hashlib._Hash, tensor: torch.Tensor) -> None:
    digest.update(f"{tensor.dtype}{tuple(tensor.shape)}{tensor.stride()}".encode())
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:  # the same bytes again and again, perhaps 2^31 times
            tensor = tensor.narrow(dimension, 0, min(1, tensor.shape[dimension]))
    digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
