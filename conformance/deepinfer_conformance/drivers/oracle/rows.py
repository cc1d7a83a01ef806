"""Oracle ops that act on rows alone: they carry the first channels along and fold what they are given into the digest.

Legend: T rows, K in features, N out features, G groups or n-gram length, V vocabulary, D hidden size, S streams,
F hash columns, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from deepinfer.accelerator.interface import OpOptions
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
from deepinfer_conformance.drivers.oracle.hashing import (
    CHANNELS,
    Integers,
    TokenRule,
    combined,
    first_expert,
    linear_of,
    ngram_of,
    remembered,
    token_of,
)

HEAD = "head.weight"
"""Checkpoint name of the vocabulary projection, by which the oracle knows that logits are wanted."""

NO_LOGIT = -1e30
"""Every logit but one. Finite, so that banning the oracle's token leaves a row from which one can still draw."""


class OracleLinear(OptionedGroup, LinearOps):
    """Products carry the first channels; the vocabulary projection turns the digest into one certain token."""

    def __init__(self, options: OpOptions, rule: TokenRule) -> None:
        super().__init__(options)
        self._rule = rule

    def embed(self, ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
        """Return rows whose channel 0 is the token id, with an empty digest."""
        shape = (ids_T.shape[0], table_VD.shape[1])
        embedded_TD = np.zeros(shape, dtype=numpy_type(self.activation_dtype))
        embedded_TD[:, 0] = ids_T.numpy()
        return torch.from_numpy(embedded_TD)

    def prepare(self, stored: StoredWeight, precision: Precision = "activation") -> PreparedWeight:
        """Keep the name and the width."""
        return NamedWeight(stored.name, 0, stored.out_features, precision)

    def dense(self, x_TK: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
        """Carry the channels; for the vocabulary projection return one-hot logits."""
        named = require_named(weight)
        dtype = named.dtype(self._options)
        if named.name != HEAD:
            return carried(x_TK, named.out_features, dtype)
        words_T3 = words_of(x_TK)
        tokens_T = token_of(words_T3[:, 0], words_T3[:, 1], named.out_features, self._rule)
        logits_TV = x_TK.new_full((x_TK.shape[0], named.out_features), NO_LOGIT, dtype=dtype)
        return logits_TV.scatter_(1, torch.from_numpy(tokens_T)[:, None], 0.0)

    def prepare_grouped(self, stored: StoredWeight, groups: int) -> PreparedWeight:
        """Keep the name and the width of one group."""
        return NamedWeight(stored.name, 0, stored.out_features // groups)

    def grouped(self, x_TGK: torch.Tensor, weight: PreparedWeight) -> torch.Tensor:
        """Carry the channels of each group."""
        return carried(x_TGK, require_named(weight).out_features, self.activation_dtype)


class OracleNorm(OptionedGroup, NormOps):
    """Norms change nothing; a rotation writes its position into channel 2."""

    def rms(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """Return a copy."""
        del weight_D, eps
        return x_TD.clone()

    def rotary(
        self, x: torch.Tensor, table: RotaryTable, position_T: torch.Tensor, *, inverse: bool = False
    ) -> torch.Tensor:
        """Add each row's position to channel 2; the inverse subtracts it."""
        del table
        rotated = x.numpy().copy()
        turned_T = position_T.numpy() if x.dim() == 2 else position_T.numpy()[:, None]
        if inverse:
            rotated[..., 2] -= turned_T
        else:
            rotated[..., 2] += turned_T
        return torch.from_numpy(rotated)


class OracleMixing(OptionedGroup, MixingOps):
    """All streams are equal: the last sublayer's output."""

    def mixes(
        self, streams_TSD: torch.Tensor, weights: MixWeights, iterations: int, mix_eps: float, norm_eps: float
    ) -> Mix:
        """Return coefficients of zero; nothing reads them."""
        del weights, iterations, mix_eps, norm_eps
        return zero_mix(streams_TSD, self.wide_dtype)

    def collapse(self, streams_TSD: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
        """Return stream 0."""
        del pre_TS
        return torch.from_numpy(streams_TSD.numpy()[:, 0].copy())

    def post(self, output_TD: torch.Tensor, streams_TSD: torch.Tensor, mix: Mix) -> torch.Tensor:
        """Put the output into every stream."""
        del mix
        return torch.from_numpy(output_TD.numpy()[:, None].repeat(streams_TSD.shape[1], axis=1))


class OracleMemory(OptionedGroup, MemoryOps):
    """The look-back is hashed into the digest. The numbers that stand for table rows are not inside the table."""

    def ngram_rows(self, tokens_TG: torch.Tensor, constants: NgramHash) -> torch.Tensor:
        """Return the hash of the look-back in every column, -1 where the row itself is dead."""
        seen_TG = tokens_TG.numpy()
        rows_T = np.where(seen_TG[:, 0] < 0, -1, ngram_of(seen_TG, constants.pad_id))
        return torch.from_numpy(rows_T[:, None].repeat(constants.primes_Gh.numel(), axis=1))

    def gather_rows(self, table: NgramTable, rows_TF: torch.Tensor) -> torch.Tensor:
        """Return the hash of column 0 in the first channel; a row of -1 gives zeros."""
        width = rows_TF.shape[1] * table.rows_RW.shape[1]
        gathered = np.zeros((rows_TF.shape[0], width), dtype=numpy_type(self.activation_dtype))
        gathered[:, 0] = rows_TF.numpy()[:, 0].clip(min=0)
        return torch.from_numpy(gathered)

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
        """Fold the hash of the look-back into the digest of rows that are alive."""
        del value_TD, query_weight_SD, key_weight_SD, norm_eps
        gated_TSD = streams_TSD.numpy().copy()
        digest_T = gated_TSD[:, 0, 1].astype(np.int64)
        folded_T = remembered(digest_T, key_TSD.numpy()[:, 0, 0].astype(np.int64))
        gated_TSD[:, :, 1] = np.where(alive_T.numpy(), folded_T, digest_T)[:, None]
        return torch.from_numpy(gated_TSD)


class OracleExperts(OptionedGroup, ExpertOps):
    """A row's experts follow from what it carries; each slot brings its expert's number, and the order counts."""

    def route(
        self,
        x_TD: torch.Tensor,
        router: RouterWeights,
        image_T: torch.Tensor,
        valid_T: torch.Tensor,
        top_k: int,
        scale: float,
    ) -> Routing:
        """Return k neighbouring experts with weight 1, -1 with weight 0 for padding rows."""
        del scale
        experts = router.gate_ED.shape[0]
        first_T = first_expert(linear_of(words_of(x_TD)), image_T.numpy(), experts)
        experts_Tk = (first_T[:, None] + np.arange(top_k)) % experts
        valid_Tk = valid_T.numpy()[:, None].repeat(top_k, axis=1)
        return Routing(
            experts_Tk=torch.from_numpy(np.where(valid_Tk, experts_Tk, -1)),
            weights_Tk=torch.from_numpy(valid_Tk.astype(numpy_type(self.wide_dtype))),
        )

    def prepare(self, experts: Sequence[StoredExpert], limit: float) -> PreparedWeight:
        """Keep a name and the hidden size."""
        del limit
        return named_experts(experts)

    def prepare_shared(self, expert: StoredExpert, limit: float) -> PreparedWeight:
        """Keep the name and the hidden size."""
        del limit
        return NamedWeight(expert.w2.name, 0, expert.w2.out_features)

    def routed(self, x_TD: torch.Tensor, routing: Routing, experts: PreparedWeight) -> torch.Tensor:
        """Return slots whose channel 1 is the number of the expert plus one, times the routing weight."""
        del experts
        slots_TkD = x_TD.new_zeros((*routing.experts_Tk.shape, x_TD.shape[1]), dtype=self.wide_dtype)
        slots_TkD[:, :, 1] = torch.from_numpy(_slots(routing))
        return slots_TkD

    def shared(self, x_TD: torch.Tensor, expert: PreparedWeight) -> torch.Tensor:
        """Return the row itself."""
        del expert
        return x_TD.to(self.wide_dtype, copy=True)

    def combine(self, shared_TD: torch.Tensor, slots_TkD: torch.Tensor) -> torch.Tensor:
        """Fold the slots into the digest of the shared output, in top-k order."""
        return self._combined(shared_TD, slots_TkD.numpy()[:, :, 1].astype(np.int64))

    def local(
        self, x_TD: torch.Tensor, routing: Routing, experts: PreparedWeight, shared: PreparedWeight
    ) -> torch.Tensor:
        """Return what shared, routed and combine give."""
        del experts, shared
        return self._combined(x_TD, _slots(routing))

    def _combined(self, shared_TD: torch.Tensor, slots_Tk: Integers) -> torch.Tensor:
        output_TD = shared_TD.numpy().astype(numpy_type(self.activation_dtype))
        output_TD[:, 1] = combined(output_TD[:, 1].astype(np.int64), slots_Tk)
        return torch.from_numpy(output_TD)


def words_of(x: torch.Tensor) -> Integers:
    """Return the integers [..., 3] that rows carry."""
    return x.numpy()[..., :CHANNELS].astype(np.int64)


def numpy_type(dtype: torch.dtype) -> np.dtype[np.floating]:
    """Return the NumPy type of an activation dtype."""
    return np.dtype(np.float64 if dtype == torch.float64 else np.float32)


def carried(x: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros [..., width] with the first channels of x."""
    out = np.zeros((*x.shape[:-1], width), dtype=numpy_type(dtype))
    kept = min(CHANNELS, width, x.shape[-1])
    out[..., :kept] = x.numpy()[..., :kept]
    return torch.from_numpy(out)


def _slots(routing: Routing) -> Integers:
    return (routing.experts_Tk.numpy() + 1) * routing.weights_Tk.numpy().astype(np.int64)
