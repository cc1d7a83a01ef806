"""Engram: hashed n-gram rows of a host-resident table, gated into the streams (model.md section 8).

Legend: T rows, G n-gram length, F hash columns ((G-1) * heads), W row width, S streams, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer.accelerator.ops.base import OpGroup, not_implemented, op


@dataclass(frozen=True, slots=True)
class NgramHash:
    """Constants of one Engram layer: multipliers [G], primes [(G-1), heads], row offsets [F] as int64; pad id."""

    multipliers_G: torch.Tensor
    primes_Gh: torch.Tensor
    offsets_F: torch.Tensor
    pad_id: int


@dataclass(frozen=True, slots=True)
class NgramTable:
    """One layer's table, usually in host memory: codes [rows, W] as e4m3 with e8m0 scales [rows, W/32], or floats."""

    name: str
    rows_RW: torch.Tensor
    scales: torch.Tensor | None


class MemoryOps(OpGroup):
    """Hash, look-up and gate. The hash depends on token ids only, so that rows can be fetched ahead."""

    group = "memory"

    @op
    def ngram_rows(self, tokens_TG: torch.Tensor, constants: NgramHash) -> torch.Tensor:
        """Return int64 [T, F] table rows, offsets included.

        ``tokens_TG[t, s]`` is the mapped id of the token s positions back, or -1 where the history has begun not yet or
        the token lies in an image span. A -1 blocks itself and everything further back: blocked places use the
        pad id. ``roll ^= v_s * multiplier_s`` in int64; column (s-1, head) is ``roll_s mod prime + offset``.
        A row whose own token is -1 yields -1 in every column. Integer arithmetic, exact.
        """
        not_implemented(self, "ngram_rows")

    @op
    def gather_rows(self, table: NgramTable, rows_TF: torch.Tensor) -> torch.Tensor:
        """Return [T, F*W] in the activation dtype on the device: dequantised table rows; row -1 gives zeros.

        Row times width exceeds 2^31: 64-bit offsets. Released tables decode exactly; served rounds to bfloat16.
        """
        not_implemented(self, "gather_rows")

    @op
    def gate(
        self,
        streams_TSD: torch.Tensor,
        key_TSD: torch.Tensor,
        value_TD: torch.Tensor,
        query_weight_SD: torch.Tensor,
        key_weight_SD: torch.Tensor,
        alive_T: torch.Tensor,
        norm_eps: float,
    ) -> torch.Tensor:
        """Return new streams ``x_i + gate_i * value``.

        ``dot_i = sum_d x_i*q_weight_i*k_weight_i*key_i * rsqrt(mean(x_i^2)+eps) * rsqrt(mean(key_i^2)+eps) * D^-0.5``;
        ``gate_i = sigmoid(copysign(sqrt(max(|dot_i|, 1e-6)), dot_i))``; float32, rounded once. Rows with
        ``alive_T`` False keep their streams bit for bit. NaN is not laundered into a clamp value. R2.
        """
        not_implemented(self, "gate")
