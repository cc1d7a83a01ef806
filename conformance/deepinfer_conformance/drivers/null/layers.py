"""Ops of the null driver that act on rows alone: linear, norm, mixing, memory, experts.

Legend: T rows, K in features, N out features, G groups, V vocabulary, D hidden size, S streams, F hash columns,
W row width, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepinfer.accelerator.ops.experts import ExpertOps, RouterWeights, Routing
from deepinfer.accelerator.ops.linear import LinearOps
from deepinfer.accelerator.ops.memory import MemoryOps, NgramHash, NgramTable
from deepinfer.accelerator.ops.mixing import Mix, MixingOps, MixWeights
from deepinfer.accelerator.ops.norm import NormOps, RotaryTable
from deepinfer.accelerator.weights import Precision, PreparedWeight, StoredExpert, StoredWeight
from deepinfer_conformance.drivers.host import (
    NamedWeight,
    OptionedGroup,
    named_experts,
    require_named,
    zero_mix,
)


class NullLinear(OptionedGroup, LinearOps):
    """Products are zeros."""

    def embed(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return zeros [T, D]."""
        return table_VD.new_zeros((ids_T.shape[0], table_VD.shape[1]), dtype=self.activation_dtype)

    def prepare(self, stored: StoredWeight, precision: Precision = "activation") -> PreparedWeight:
        """Keep the name and the width."""
        return NamedWeight(stored.name, 0, stored.out_features, precision)

    def dense(self, x_TK: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
        """Return zeros [T, N]."""
        named = require_named(weight)
        return x_TK.new_zeros((x_TK.shape[0], named.out_features), dtype=named.dtype(self._options))

    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        """Keep the name and the width of one group."""
        return NamedWeight(stored.name, 0, stored.out_features // groups)

    def grouped(self, x_TGK: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
        """Return zeros [T, G, N]."""
        named = require_named(weight)
        return x_TGK.new_zeros((*x_TGK.shape[:2], named.out_features), dtype=self.activation_dtype)


class NullNorm(OptionedGroup, NormOps):
    """Zeros like the input."""

    def rms(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return zeros like x."""
        del weight_D, eps
        return torch.zeros_like(x_TD)

    def rotary(
        self, x: torch.Tensor, table: RotaryTable, position_T: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """Return zeros like x."""
        del table, position_T, inverse
        return torch.zeros_like(x)


class NullMixing(OptionedGroup, MixingOps):
    """Streams of zeros."""

    def mixes(
        self, streams_TSD: torch.Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float
    ) -> Mix:
        """Return coefficients of zero."""
        del weights, iterations, mix_eps, norm_eps
        return zero_mix(streams_TSD, self.wide_dtype)

    def collapse(self, streams_TSD: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
        """Return zeros [T, D]."""
        del pre_TS
        return streams_TSD.new_zeros((streams_TSD.shape[0], streams_TSD.shape[2]))

    def post(self, output_TD: torch.Tensor, streams_TSD: torch.Tensor, mix: Mix) -> torch.Tensor:
        """Return zeros [T, S, D]."""
        del output_TD, mix
        return torch.zeros_like(streams_TSD, memory_format=torch.contiguous_format)


class NullMemory(OptionedGroup, MemoryOps):
    """No row is hashed or fetched."""

    def ngram_rows(self, tokens_TG: torch.Tensor, constants: NgramHash) -> torch.Tensor:
        """Return -1, "no row", in every column."""
        columns = constants.primes_Gh.numel()
        return tokens_TG.new_full((tokens_TG.shape[0], columns), -1, dtype=torch.int64)

    def gather_rows(self, table: NgramTable, rows_TF: torch.Tensor) -> torch.Tensor:
        """Return zeros [T, F*W]."""
        width = rows_TF.shape[1] * table.rows_RW.shape[1]
        return rows_TF.new_zeros((rows_TF.shape[0], width), dtype=self.activation_dtype)

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
        """Return zeros [T, S, D]."""
        del key_TSD, value_TD, query_weight_SD, key_weight_SD, alive_T, norm_eps
        return torch.zeros_like(streams_TSD, memory_format=torch.contiguous_format)


class NullExperts(OptionedGroup, ExpertOps):
    """Every valid row goes to experts 0 .. k-1 with weight zero."""

    def route(
        self,
        x_TD: torch.Tensor,
        router: RouterWeights,
        image_T: torch.Tensor,
        valid_T: torch.Tensor,
        top_k: int,
        scale: float,
    ) -> Routing:
        """Return experts 0 .. k-1, -1 for padding rows."""
        del router, image_T, scale
        experts_Tk = torch.arange(top_k, device=x_TD.device).expand(x_TD.shape[0], top_k)
        return Routing(
            experts_Tk=torch.where(valid_T[:, None], experts_Tk, -1),
            weights_Tk=x_TD.new_zeros((x_TD.shape[0], top_k), dtype=self.wide_dtype),
        )

    def prepare(self, experts: Sequence[StoredExpert], limit: float) -> PreparedWeight:
        """Keep the name of the first expert and the hidden size."""
        del limit
        return named_experts(experts)

    def prepare_shared(self, expert: StoredExpert, limit: float) -> PreparedWeight:
        """Keep the name and the hidden size."""
        del limit
        return NamedWeight(expert.w2.name, 0, expert.w2.out_features)

    def routed(self, x_TD: torch.Tensor, routing: Routing, experts: PreparedWeight) -> torch.Tensor:
        """Return zeros [T, k, D]."""
        del experts
        slots = routing.experts_Tk.shape[1]
        return x_TD.new_zeros((x_TD.shape[0], slots, x_TD.shape[1]), dtype=self.wide_dtype)

    def shared(self, x_TD: torch.Tensor, expert: PreparedWeight) -> torch.Tensor:
        """Return zeros [T, D]."""
        del expert
        return x_TD.new_zeros(x_TD.shape, dtype=self.wide_dtype)

    def combine(self, shared_TD: torch.Tensor, slots_TkD: torch.Tensor) -> torch.Tensor:
        """Return zeros [T, D]."""
        del slots_TkD
        return shared_TD.new_zeros(shared_TD.shape, dtype=self.activation_dtype)

    def local(
        self, x_TD: torch.Tensor, routing: Routing, experts: PreparedWeight, shared: PreparedWeight
    ) -> torch.Tensor:
        """Return zeros [T, D]."""
        del routing, experts, shared
        return x_TD.new_zeros(x_TD.shape, dtype=self.activation_dtype)
