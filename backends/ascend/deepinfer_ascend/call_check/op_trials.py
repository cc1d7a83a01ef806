"""Whole ops of the driver on tensors without data: the glue between the operators, and which of them are called.

An op that reads a value on the host cannot run here; what is claimed safe for graphs must.

Legend: T rows, H heads, C head width, K in features, N out features, S streams, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import WindowCache
from deepinfer.accelerator.ops import ExpertOps, LinearOps, MemoryOps, MixingOps, NormOps, OpGroup, PlumbingOps
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.ops.memory import NgramHash
from deepinfer.accelerator.ops.mixing import Mix, MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.accelerator.weights import StoredExpert, StoredFormat, StoredWeight
from deepinfer.numerics import WindowRecord
from deepinfer_ascend.call_check.sites import F32, I64, U8, Maker, Outcome
from deepinfer_ascend.call_check.sizes import Sizes

LIMIT: Final = 10.0
NGRAM: Final = 4


@dataclass(frozen=True, slots=True)
class Bench:
    """What a trial gets.

    Attributes:
        groups: the driver's op groups, built for the device.
        make: makes tensors on the device.
        store: makes tensors of a checkpoint, on meta or on the host.
        sizes: the shapes.
        activation: dtype of activations.
    """

    groups: Mapping[str, OpGroup]
    make: Maker
    store: Maker
    sizes: Sizes
    activation: torch.dtype

    def stored(self, rows: int, columns: int, stored_format: StoredFormat) -> StoredWeight:
        """Return a stored weight of zeros, or of nothing."""
        per_byte = 2 if stored_format == "mxfp4" else 1
        dtype = torch.int8 if stored_format == "mxfp4" else torch.float8_e4m3fn
        codes = torch.zeros((rows, columns // per_byte), dtype=U8, device=self.store.device).view(dtype)
        scale_rows = rows if stored_format == "mxfp4" else -(-rows // 32)
        scale = torch.full((scale_rows, -(-columns // 32)), 127, dtype=U8, device=self.store.device)
        return StoredWeight("trial", stored_format, codes, scale.view(torch.float8_e8m0fnu), rows, columns)

    def expert(self, stored_format: StoredFormat) -> StoredExpert:
        """Return one stored expert."""
        wide, narrow = self.sizes.hidden, self.sizes.intermediate
        return StoredExpert(
            w1=self.stored(narrow, wide, stored_format),
            w2=self.stored(wide, narrow, stored_format),
            w3=self.stored(narrow, wide, stored_format),
        )

    def x(self) -> Tensor:
        """Return activations [T, D]."""
        return self.make(self.sizes.rows, self.sizes.hidden, dtype=self.activation)

    def routing(self) -> Routing:
        """Return a routing [T, k]."""
        shape = (self.sizes.rows, self.sizes.top_k)
        return Routing(self.make(*shape, dtype=I64), self.make(*shape, dtype=F32))


Trial = Callable[[Bench], Outcome]


def _embed(b: Bench) -> Outcome:
    linear, s = cast("LinearOps", b.groups["linear"]), b.sizes
    found = linear.embed(b.make(s.rows, dtype=I64), b.make(s.vocabulary, s.hidden))
    return [(found, ((s.rows, s.hidden), b.activation))]


def _dense(b: Bench) -> Outcome:
    linear, s = cast("LinearOps", b.groups["linear"]), b.sizes
    weight = linear.prepare(b.stored(s.lora, s.hidden, "fp8_block32"))
    return [(linear.dense(b.x(), weight), ((s.rows, s.lora), b.activation))]


def _grouped(b: Bench) -> Outcome:
    linear, s = cast("LinearOps", b.groups["linear"]), b.sizes
    weight = linear.prepare_grouped(b.stored(s.groups * s.group_out, s.group_in, "fp8_block32"), s.groups)
    found = linear.grouped(b.make(s.rows, s.groups, s.group_in, dtype=b.activation), weight)
    return [(found, ((s.rows, s.groups, s.group_out), b.activation))]


def _rms(b: Bench) -> Outcome:
    norm, s = cast("NormOps", b.groups["norm"]), b.sizes
    return [(norm.rms(b.x(), b.make(s.hidden, dtype=F32), 1e-20), ((s.rows, s.hidden), b.activation))]


def _rotary(b: Bench) -> Outcome:
    norm, s = cast("NormOps", b.groups["norm"]), b.sizes
    table = RotaryTable(b.make(64, s.rotary // 2, dtype=F32), b.make(64, s.rotary // 2, dtype=F32))
    position_T = b.make(s.rows, dtype=I64)
    outcome: Outcome = []
    for shape in ((s.rows, s.heads, s.head_width), (s.rows, s.head_width)):
        for inverse in (False, True):
            found = norm.rotary(b.make(*shape, dtype=b.activation), table, position_T, inverse=inverse)
            outcome.append((found, (shape, b.activation)))
    return outcome


def _store_window(b: Bench) -> Outcome:
    codec, s = cast("CodecOps", b.groups["codec"]), b.sizes
    record = WindowRecord(s.head_width)
    # Two layers share a slot, so that the second one's view has a pitch and an offset.
    pool = b.make(s.slots, 2 * s.ring * record.nbytes, dtype=U8)
    window = torch.unflatten(pool[:, s.ring * record.nbytes :], 1, (s.ring, record.nbytes))
    codec.store_window(WindowCache(window, record), b.make(s.rows, record.nbytes, dtype=U8), b.make(s.rows, dtype=I64))
    return [(window, ((s.slots, s.ring, record.nbytes), U8))]


def _mixes(b: Bench) -> Outcome:
    mixing, s = cast("MixingOps", b.groups["mixing"]), b.sizes
    outputs = (2 + s.streams) * s.streams
    weights = MixWeights(
        b.make(outputs, s.streams * s.hidden, dtype=F32), b.make(outputs, dtype=F32), b.make(3, dtype=F32)
    )
    found = mixing.mixes(b.make(s.rows, s.streams, s.hidden, dtype=b.activation), weights, 20, 1e-6, 1e-20)
    return [
        (found.pre_TS, ((s.rows, s.streams), F32)),
        (found.post_TS, ((s.rows, s.streams), F32)),
        (found.comb_TSS, ((s.rows, s.streams, s.streams), F32)),
    ]


def _collapse(b: Bench) -> Outcome:
    mixing, s = cast("MixingOps", b.groups["mixing"]), b.sizes
    streams = b.make(s.rows, s.streams, s.hidden, dtype=b.activation)
    found = mixing.collapse(streams, b.make(s.rows, s.streams, dtype=F32))
    return [(found, ((s.rows, s.hidden), b.activation))]


def _post(b: Bench) -> Outcome:
    mixing, s = cast("MixingOps", b.groups["mixing"]), b.sizes
    pre_TS, post_TS = b.make(s.rows, s.streams, dtype=F32), b.make(s.rows, s.streams, dtype=F32)
    mix = Mix(pre_TS, post_TS, b.make(s.rows, s.streams, s.streams, dtype=F32))
    streams = b.make(s.rows, s.streams, s.hidden, dtype=b.activation)
    return [(mixing.post(b.x(), streams, mix), ((s.rows, s.streams, s.hidden), b.activation))]


def _ngram_rows(b: Bench) -> Outcome:
    memory, s = cast("MemoryOps", b.groups["memory"]), b.sizes
    columns = (NGRAM - 1) * 8
    constants = NgramHash(
        b.make(NGRAM, dtype=I64), b.make(NGRAM - 1, 8, dtype=I64), b.make(columns, dtype=I64), pad_id=2
    )
    return [(memory.ngram_rows(b.make(s.rows, NGRAM, dtype=I64), constants), ((s.rows, columns), I64))]


def _engram_gate(b: Bench) -> Outcome:
    memory, s = cast("MemoryOps", b.groups["memory"]), b.sizes
    shape = (s.rows, s.streams, s.hidden)
    streams, keys = b.make(*shape, dtype=b.activation), b.make(*shape, dtype=b.activation)
    weights = b.make(s.streams, s.hidden), b.make(s.streams, s.hidden)
    alive_T = b.make(s.rows, dtype=torch.bool)
    return [(memory.gate(streams, keys, b.x(), *weights, alive_T, 1e-20), (shape, b.activation))]


def _route(b: Bench) -> Outcome:
    experts, s = cast("ExpertOps", b.groups["experts"]), b.sizes
    router = RouterWeights(b.make(s.experts, s.hidden), b.make(s.experts, dtype=F32), b.make(s.experts, dtype=F32))
    image_T, valid_T = b.make(s.rows, dtype=torch.bool), b.make(s.rows, dtype=torch.bool)
    found = experts.route(b.x(), router, image_T, valid_T, s.top_k, 1.5)
    return [(found.experts_Tk, ((s.rows, s.top_k), I64)), (found.weights_Tk, ((s.rows, s.top_k), F32))]


def _routed(b: Bench) -> Outcome:
    experts, s = cast("ExpertOps", b.groups["experts"]), b.sizes
    outcome: Outcome = []
    formats: tuple[StoredFormat, ...] = ("mxfp4", "fp8_block32")
    for stored_format in formats:
        prepared = experts.prepare([b.expert(stored_format)] * s.experts, LIMIT)
        found = experts.routed(b.x(), b.routing(), prepared)
        outcome.append((found, ((s.rows, s.top_k, s.hidden), F32)))
    return outcome


def _shared(b: Bench) -> Outcome:
    experts, s = cast("ExpertOps", b.groups["experts"]), b.sizes
    prepared = experts.prepare_shared(b.expert("fp8_block32"), LIMIT)
    return [(experts.shared(b.x(), prepared), ((s.rows, s.hidden), F32))]


def _combine(b: Bench) -> Outcome:
    experts, s = cast("ExpertOps", b.groups["experts"]), b.sizes
    slots = b.make(s.rows, s.top_k, s.hidden, dtype=F32)
    return [(experts.combine(b.make(s.rows, s.hidden, dtype=F32), slots), ((s.rows, s.hidden), b.activation))]


def _local(b: Bench) -> Outcome:
    experts, s = cast("ExpertOps", b.groups["experts"]), b.sizes
    routed = experts.prepare([b.expert("mxfp4")] * s.experts, LIMIT)
    shared = experts.prepare_shared(b.expert("fp8_block32"), LIMIT)
    return [(experts.local(b.x(), b.routing(), routed, shared), ((s.rows, s.hidden), b.activation))]


def _slots(b: Bench) -> Outcome:
    plumbing, s = cast("PlumbingOps", b.groups["plumbing"]), b.sizes
    requests = 2

    def whole(*shape: int) -> Tensor:
        return b.make(*shape, dtype=I64)

    step = StepLayout(
        kind="decode",
        block_size=8,
        ring=s.ring,
        row_starts_R1=whole(requests + 1),
        cached_R=whole(requests),
        state_slots_R=whole(requests),
        block_table_RB=whole(requests, 4),
        request_T=whole(s.rows),
        position_T=whole(s.rows),
        window_start_R=whole(requests),
        image_T=b.make(s.rows, dtype=torch.bool),
        valid_T=b.make(s.rows, dtype=torch.bool),
        max_position=32,
        max_rows=s.rows,
    )
    expected: Any = ((s.rows,), I64)
    return [(plumbing.window_slots(step), expected), (plumbing.entry_slots(step, 2), expected)]


TRIALS: Final[Mapping[str, Trial]] = {
    "linear.embed": _embed,
    "linear.dense": _dense,
    "linear.grouped": _grouped,
    "norm.rms": _rms,
    "norm.rotary": _rotary,
    "codec.store_window": _store_window,
    "mixing.mixes": _mixes,
    "mixing.collapse": _collapse,
    "mixing.post": _post,
    "memory.ngram_rows": _ngram_rows,
    "memory.gate": _engram_gate,
    "experts.route": _route,
    "experts.routed": _routed,
    "experts.shared": _shared,
    "experts.combine": _combine,
    "experts.local": _local,
    "plumbing.window_slots": _slots,
    "plumbing.entry_slots": _slots,
}
"""The ops that can be tried without values, prepare ops inside those that use what they made."""
