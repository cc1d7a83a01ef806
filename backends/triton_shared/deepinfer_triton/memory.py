"""Op group ``memory``: n-gram hash, table look-up, gate.

Legend: T rows, G n-gram length, F hash columns, S streams, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from deepinfer.accelerator.ops.memory import MemoryOps, NgramHash, NgramTable
from deepinfer_triton.arithmetic import TritonGroup
from deepinfer_triton.engram_gate import gate
from deepinfer_triton.ngram_hash import ngram_rows
from deepinfer_triton.table_rows import gather_rows


class TritonMemoryOps(TritonGroup, MemoryOps):
    """Tables stay where and as they are; only looked-up rows are decoded."""

    def ngram_rows(self, tokens_TG: Tensor, constants: NgramHash) -> Tensor:
        """See :meth:`MemoryOps.ngram_rows`."""
        return ngram_rows(tokens_TG, constants)

    def gather_rows(self, table: NgramTable, rows_TF: Tensor) -> Tensor:
        """See :meth:`MemoryOps.gather_rows`."""
        return gather_rows(table, rows_TF, self.arithmetic)

    def gate(
        self,
        streams_TSD: Tensor,
        key_TSD: Tensor,
        value_TD: Tensor,
        query_weight_SD: Tensor,
        key_weight_SD: Tensor,
        alive_T: Tensor,
        norm_eps: float,
    ) -> Tensor:
        """See :meth:`MemoryOps.gate`."""
        return gate(streams_TSD, key_TSD, value_TD, query_weight_SD, key_weight_SD, alive_T, norm_eps)
