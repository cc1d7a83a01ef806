"""Philox4x32-10, the counter-based generator: identical bits on every device, no state.

32-bit words are held in int64 tensors as 0 .. 2^32 - 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer.errors import ArgumentError

_WORD_MASK = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_KEY_STEP_0 = 0x9E3779B9
_KEY_STEP_1 = 0xBB67AE85
_ROUNDS = 10


def _high(product: Tensor) -> Tensor:
    # The product of two words fills 64 bits and wraps into the sign of int64; its bits are still the right ones, and
    # the mask removes the sign that the arithmetic shift pulls in.
    return (product >> 32) & _WORD_MASK


def philox4x32_10(key: Tensor, counter: Tensor) -> Tensor:
    """Returns the four output words int64 ``[..., 4]`` of ten Philox rounds.

    Args:
        key: int64 ``[..., 2]``, low word first; each word is taken modulo 2^32.
        counter: int64 ``[..., 4]``, low word first; leading dimensions broadcast with those of ``key``.

    Raises:
        ArgumentError: if a dtype or a last dimension is wrong.
    """
    problems = [
        f"{name} is {value.dtype} {tuple(value.shape)}; give int64 [..., {words}]"
        for name, value, words in (("key", key, 2), ("counter", counter, 4))
        if value.dtype != torch.int64 or value.dim() == 0 or value.shape[-1] != words
    ]
    if problems:
        raise ArgumentError("philox4x32_10", problems)
    if key.device.type == counter.device.type == "cpu":
        return torch.from_numpy(_rounds_by_numpy(key.numpy(), counter.numpy()))
    return _rounds_by_torch(key, counter)


def _rounds_by_torch(key: Tensor, counter: Tensor) -> Tensor:
    key_0, key_1 = (key & _WORD_MASK).unbind(-1)
    word_0, word_1, word_2, word_3 = (counter & _WORD_MASK).unbind(-1)
    for _ in range(_ROUNDS):
        product_0 = word_0 * _MULTIPLIER_0
        product_1 = word_2 * _MULTIPLIER_1
        word_0, word_1, word_2, word_3 = (
            _high(product_1) ^ word_1 ^ key_0,
            product_1 & _WORD_MASK,
            _high(product_0) ^ word_3 ^ key_1,
            product_0 & _WORD_MASK,
        )
        key_0 = (key_0 + _KEY_STEP_0) & _WORD_MASK
        key_1 = (key_1 + _KEY_STEP_1) & _WORD_MASK
    # From the second round on every word depends on key and counter, so all have the broadcast shape.
    return torch.stack((word_0, word_1, word_2, word_3), dim=-1)


def _rounds_by_numpy(key: NDArray[np.int64], counter: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the output words by numpy, whose calls cost a tenth of torch's: a draw is small and has many."""
    mask, half = np.uint64(_WORD_MASK), np.uint64(32)
    # A row for words 0 and 2, which are multiplied, and one for words 1 and 3, which are not.
    leading = np.broadcast_shapes(key.shape[:-1], counter.shape[:-1])
    words = np.moveaxis(np.broadcast_to(counter.astype(np.uint64), (*leading, 4)), -1, 0) & mask
    multiplied, other = words[0::2], words[1::2]
    keys = np.moveaxis(np.broadcast_to(key.astype(np.uint64), (*leading, 2)), -1, 0) & mask
    column = (2,) + (1,) * len(leading)
    multipliers = np.array([_MULTIPLIER_0, _MULTIPLIER_1], dtype=np.uint64).reshape(column)
    steps = np.array([_KEY_STEP_0, _KEY_STEP_1], dtype=np.uint64).reshape(column)
    for _ in range(_ROUNDS):
        product = multiplied * multipliers
        multiplied = (product >> half)[::-1] ^ other ^ keys
        other = (product & mask)[::-1]
        keys = (keys + steps) & mask
    result = np.stack((multiplied[0], other[0], multiplied[1], other[1]), axis=-1)
    return result.astype(np.int64)


def uniform_53(seeds: Tensor, streams: Tensor) -> Tensor:
    """Returns float64 in [0, 1): the top 53 bits of the first output u64 (word 0 low, word 1 high), over 2^53.

    The key is the 64-bit seed and the counter is the 64-bit stream in the two low words, other words 0.

    Args:
        seeds: int64, negative values taken modulo 2^64.
        streams: int64, likewise; broadcasts with ``seeds``.

    Raises:
        ArgumentError: if a dtype is not int64.
    """
    problems = [
        f"{name} are {value.dtype}; give int64"
        for name, value in (("seeds", seeds), ("streams", streams))
        if value.dtype != torch.int64
    ]
    if problems:
        raise ArgumentError("uniform_53", problems)
    key = torch.stack((seeds & _WORD_MASK, _high(seeds)), dim=-1)
    zero = torch.zeros_like(streams)
    counter = torch.stack((streams & _WORD_MASK, _high(streams), zero, zero), dim=-1)
    words = philox4x32_10(key, counter)
    top_bits = (words[..., 1] << 21) | (words[..., 0] >> 11)
    return top_bits.to(torch.float64) * 2.0**-53
