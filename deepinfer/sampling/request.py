"""What sampling keeps of one request from its admission to its end."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from deepinfer.accelerator.ops.sampling import WEIGHT_BITS
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.penalties import SeenTokens

CONSTANT_NAMES = ("temperature", "top_k", "top_p", "min_weight", "seed", "flags")
"""The 64-bit columns of :attr:`RequestSampling.constants`, in order; temperature and top_p are float64."""

_PACK = struct.Struct("=dqdqqq")


class RowFlag(IntFlag):
    """What can matter for a request; the union over a batch tells what its step can leave out."""

    GREEDY = 1
    TOP_K = 2
    TOP_P = 4
    TOP_P_ALONE = 8
    MIN_P = 16
    BIAS = 32
    PENALTIES = 64
    BANS = 128
    ALLOWED = 256
    FORCED = 512
    LOG_PROBABILITIES = 1024
    RAW_LOG_PROBABILITIES = 2048
    DRAWN = 4096


@dataclass(frozen=True, slots=True, eq=False)
class RequestSampling:
    """One answer's sampling constants, converted once; nothing here knows about steps.

    Build it with :meth:`create`. After a preemption the same object goes on: it holds no progress.

    Attributes:
        params: the validated parameters.
        vocab_size: V.
        seed: the answer's own seed, never None.
        flags: what can matter.
        constants: the per-row numbers, packed; see :data:`CONSTANT_NAMES`.
        bias_ids: ids of the logit bias.
        bias_values: their values.
        blacklist: ids that are never emitted.
        early_bans: ids that are banned for the first outputs, by :attr:`early_ban_ends`.
        early_ban_ends: for each of ``early_bans``: banned while fewer outputs than this are out.
        early_ban_end: the largest of them.
        allowed: the only ids that may be emitted; empty without the flag.
        forced: the forced continuation, -1 for none.
        seen: counts for the penalties.
    """

    params: SamplingParams
    vocab_size: int
    seed: int
    flags: RowFlag
    constants: bytes
    bias_ids: NDArray[np.int64]
    bias_values: NDArray[np.float32]
    blacklist: NDArray[np.int64]
    early_bans: NDArray[np.int64]
    early_ban_ends: NDArray[np.int64]
    early_ban_end: int
    allowed: NDArray[np.int64]
    forced: tuple[int, ...]
    seen: SeenTokens

    @classmethod
    def create(
        cls,
        params: SamplingParams,
        *,
        seed: int,
        prompt_token_ids: Sequence[int],
        end_token_ids: Sequence[int],
        vocab_size: int,
    ) -> RequestSampling:
        """Convert the parameters of one answer.

        Args:
            params: parameters without :meth:`~SamplingParams.problems`.
            seed: :func:`~deepinfer.sampling.streams.sibling_seed` of the request's own or random seed.
            prompt_token_ids: the prompt, for the repetition penalty.
            end_token_ids: the model's end tokens.
            vocab_size: V.
        """
        ban_ends = _early_ban_ends(params, end_token_ids)
        top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        min_weight = int(params.min_p * 2**WEIGHT_BITS)
        flags = _flags(
            params, top_k=top_k, min_weight=min_weight, has_bans=bool(params.blacklist_token_ids or ban_ends)
        )
        bias = params.logit_bias or {}
        return cls(
            params=params,
            vocab_size=vocab_size,
            seed=seed,
            flags=flags,
            constants=_PACK.pack(params.temperature, top_k, params.top_p, min_weight, seed, flags),
            bias_ids=np.array(list(bias), np.int64),
            bias_values=np.array(list(bias.values()), np.float32),
            blacklist=np.array(sorted(set(params.blacklist_token_ids)), np.int64),
            early_bans=np.array(list(ban_ends), np.int64),
            early_ban_ends=np.array(list(ban_ends.values()), np.int64),
            early_ban_end=max(ban_ends.values(), default=0),
            allowed=np.array(sorted(set(params.allowed_token_ids or ())), np.int64),
            forced=tuple(params.golden_token_ids or ()),
            seen=SeenTokens(params, prompt_token_ids),
        )

    def bans(self, emitted_tokens: int) -> NDArray[np.int64]:
        """Return the ids that may not be the next output when this many are out."""
        if emitted_tokens >= self.early_ban_end:
            return self.blacklist
        return np.concatenate((self.blacklist, self.early_bans[self.early_ban_ends > emitted_tokens]))

    def forced_id(self, emitted_tokens: int) -> int:
        """Return the id that the next output must be when this many are out, or -1."""
        return self.forced[emitted_tokens] if emitted_tokens < len(self.forced) else -1


def _early_ban_ends(params: SamplingParams, end_token_ids: Sequence[int]) -> dict[int, int]:
    """Return, per id, before which output count it is banned."""
    ends = dict.fromkeys(end_token_ids, params.first_n_token_no_eos)
    ending = params.stop_token_ids if params.ignore_eos else (*end_token_ids, *params.stop_token_ids)
    for token_id in ending:
        ends[token_id] = max(ends.get(token_id, 0), params.min_tokens)
    return {token_id: end for token_id, end in ends.items() if end > 0}


def _flags(params: SamplingParams, *, top_k: int, min_weight: int, has_bans: bool) -> RowFlag:
    wanted = {
        RowFlag.GREEDY: params.temperature == 0,
        RowFlag.DRAWN: params.temperature > 0,
        RowFlag.TOP_K: top_k > 0,
        RowFlag.TOP_P: params.top_p < 1,
        RowFlag.TOP_P_ALONE: params.top_p < 1 and top_k == 0,
        RowFlag.MIN_P: min_weight > 0,
        RowFlag.BIAS: bool(params.logit_bias),
        RowFlag.PENALTIES: (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) != (0, 0, 1),
        RowFlag.BANS: has_bans,
        RowFlag.ALLOWED: params.allowed_token_ids is not None,
        RowFlag.FORCED: bool(params.golden_token_ids),
        RowFlag.LOG_PROBABILITIES: params.logprobs is not None and not params.raw_logprobs,
        RowFlag.RAW_LOG_PROBABILITIES: params.logprobs is not None and params.raw_logprobs,
    }
    flags = RowFlag(0)
    for flag, is_wanted in wanted.items():
        if is_wanted:
            flags |= flag
    return flags
