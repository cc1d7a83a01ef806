"""Cases of the record codecs: bytes must equal the host definitions exactly.

Legend: T rows, C record width, b record bytes, n slots, Z state slots, R ring, N blocks, E entries per block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from deepinfer.accelerator import EntryCache, IndexCache, OpOptions, WindowCache
from deepinfer.numerics import Float32Record, IndexRecord, LongRangeRecord, RecordFormat, WindowRecord
from deepinfer_conformance.case import Specimen
from deepinfer_conformance.cases.axes import KV, ONCE, PLAIN, Specimens
from deepinfer_conformance.data.call import OpCall
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.layouts import pitched
from deepinfer_conformance.data.worlds import NAN_BYTE

WIDTH = 64
BLOCKS, PER_BLOCK, SLOTS, RING = 7, 4, 5, 6
FORMATS: tuple[RecordFormat, ...] = (
    WindowRecord(WIDTH),
    LongRangeRecord(WIDTH),
    IndexRecord(WIDTH),
    Float32Record(WIDTH),
)


def specimens(seed: int) -> Iterator[Specimen]:
    """Yield the specimens of group ``codec``."""
    yield from _encode(seed)
    yield from _store(seed)
    yield from _gather(seed)


def awkward_values(draws: Draws, rows: int, width: int) -> torch.Tensor:
    """Return float32 rows full of what breaks codecs: ties, powers of two and their neighbours, -0, denormals, ends."""
    x = draws.normal("x", rows, width)
    powers = torch.tensor([2.0**e for e in range(-30, 10)])
    neighbours = torch.cat([powers, torch.nextafter(powers, powers * 2), torch.nextafter(powers, powers * 0)])
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.25, 448.0, 464.0, 480.0, 6.0, 7.0, 17.0, 18.0, 19.0])
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2688.0, 2689.0, 1e-4, 4.48e-2])
    pool = torch.cat([neighbours, ties, -ties, odd, 1.875 * powers])
    picks = pool[draws.integers("picks", 0, len(pool), rows, width)]
    x = torch.where(draws.uniform("mix", rows, width) < 0.5, x, picks)
    if rows > 4:
        x[0] = 0.0
        x[1] = x[1] * 2.0**-20
        x[2] = x[2] * 2.0**40
        x[3] = picks[3]
    return x


def _encode(seed: int) -> Iterator[Specimen]:
    found = Specimens("codec.encode", seed, PLAIN)
    for record_format in FORMATS:

        def encode(
            name: str,
            values: Callable[[Draws], torch.Tensor],
            record_format: RecordFormat = record_format,
            *,
            by_rows: bool = False,
        ) -> None:
            def build(draws: Draws, options: OpOptions) -> OpCall:
                x_TC = values(draws).to(options.activation_dtype)
                return OpCall(found.op, {"x_TC": x_TC, "record_format": record_format})

            found.add(f"{record_format.name}_{name}", build, by_rows=by_rows)

        encode("normal", lambda draws: draws.normal("x", 9, WIDTH), by_rows=True)
        encode("awkward", lambda draws: awkward_values(draws, 64, WIDTH))
        encode("no_rows", lambda draws: draws.normal("x", 0, WIDTH))
        encode("nan_and_infinity", _with_nan_and_infinity)
        encode("pitched_input", lambda draws: pitched(draws.normal("x", 5, WIDTH), float("nan")))
    return iter(found)


def _with_nan_and_infinity(draws: Draws) -> torch.Tensor:
    x = draws.normal("x", 6, WIDTH)
    x[1, 5], x[2, 17], x[3, 40], x[4, 0], x[4, 63] = float("nan"), float("inf"), float("-inf"), float("nan"), 3e38
    return x


def window_cache(draws: Draws, options: OpOptions, *, poisoned: bool) -> WindowCache:
    """Return a ring in a pitched pool, full of records or of NaN bytes."""
    record_format = WindowRecord(WIDTH) if options.kv_cache_dtype == "released" else Float32Record(WIDTH)
    return WindowCache(_pool(draws, record_format, SLOTS, RING, poisoned=poisoned), record_format)


def entry_cache(draws: Draws, options: OpOptions, *, poisoned: bool) -> EntryCache:
    """Return main records in a pitched pool."""
    record_format = LongRangeRecord(WIDTH) if options.kv_cache_dtype == "released" else Float32Record(WIDTH)
    return EntryCache(_pool(draws, record_format, BLOCKS, PER_BLOCK, poisoned=poisoned), record_format, 2)


def index_cache(draws: Draws, options: OpOptions, *, poisoned: bool) -> IndexCache:
    """Return index keys in a pitched pool, sectioned by block."""
    record_format = IndexRecord(WIDTH) if options.kv_cache_dtype == "released" else Float32Record(WIDTH)
    bytes_Nb = torch.full((BLOCKS, PER_BLOCK * record_format.nbytes), NAN_BYTE, dtype=torch.uint8)
    if not poisoned:
        parts = record_format.encode_parts(draws.normal("records", BLOCKS, PER_BLOCK, WIDTH))
        sections = record_format.block_sections(bytes_Nb, PER_BLOCK)
        sections.data.copy_(parts.data)
        if record_format.scale_bytes:
            sections.scales.copy_(parts.scales)
    return IndexCache(_row_pitched(bytes_Nb), record_format, PER_BLOCK, 2)


def _pool(draws: Draws, record_format: RecordFormat, outer: int, inner: int, *, poisoned: bool) -> torch.Tensor:
    records = torch.full((outer, inner, record_format.nbytes), NAN_BYTE, dtype=torch.uint8)
    if not poisoned:
        records = record_format.encode(draws.normal("records", outer, inner, WIDTH))
    return torch.unflatten(_row_pitched(records.flatten(1)), 1, (inner, record_format.nbytes))


def _row_pitched(bytes_Nb: torch.Tensor) -> torch.Tensor:
    """Pools are views of one wider pool in the engine: rows have a pitch and an offset, both multiples of four."""
    wide = torch.full((bytes_Nb.shape[0], bytes_Nb.shape[1] + 32), NAN_BYTE, dtype=torch.uint8)
    view = wide[:, 16:-16]
    view.copy_(bytes_Nb)
    return view


def _slots(draws: Draws, count: int, wanted: int) -> torch.Tensor:
    """Return distinct slots with one -1 in the middle and the last slot among them."""
    slots = draws.permutation("slots", count)[:wanted]
    if wanted > 2:
        slots[wanted // 2] = -1
        slots[0] = count - 1 if count - 1 not in slots.tolist() else slots[0]
    return slots


def _store(seed: int) -> Iterator[Specimen]:
    window = Specimens("codec.store_window", seed, KV)
    entries = Specimens("codec.store_entries", seed, KV)
    keys = Specimens("codec.store_index_keys", seed, KV)
    for rows in (0, 1, 9):
        for poisoned in (False, True):
            label = f"{rows}_rows_{'over_nan' if poisoned else 'over_records'}"

            def to_window(draws: Draws, options: OpOptions, rows: int = rows, poisoned: bool = poisoned) -> OpCall:  # noqa: FBT001
                cache = window_cache(draws, options, poisoned=poisoned)
                records_Tb = cache.format.encode(draws.normal("new", rows, WIDTH))
                slot_T = _slots(draws, SLOTS * RING, rows)
                return OpCall(window.op, {"cache": cache, "records_Tb": records_Tb, "slot_T": slot_T})

            def to_entries(draws: Draws, options: OpOptions, rows: int = rows, poisoned: bool = poisoned) -> OpCall:  # noqa: FBT001
                cache = entry_cache(draws, options, poisoned=poisoned)
                return OpCall(entries.op, {"cache": cache, **_new_rows(draws, options, rows)})

            def to_keys(draws: Draws, options: OpOptions, rows: int = rows, poisoned: bool = poisoned) -> OpCall:  # noqa: FBT001
                cache = index_cache(draws, options, poisoned=poisoned)
                return OpCall(keys.op, {"cache": cache, **_new_rows(draws, options, rows)})

            window.add(label, to_window)
            entries.add(label, to_entries)
            keys.add(label, to_keys)
    yield from window
    yield from entries
    yield from keys


def _new_rows(draws: Draws, options: OpOptions, rows: int) -> dict[str, object]:
    x_TC = draws.normal("new", rows, WIDTH, dtype=options.activation_dtype)
    return {"x_TC": pitched(x_TC, float("nan")), "slot_T": _slots(draws, BLOCKS * PER_BLOCK, rows)}


def _gather(seed: int) -> Iterator[Specimen]:
    window = Specimens("codec.gather_window", seed, KV)
    entries = Specimens("codec.gather_entries", seed, KV)
    keys = Specimens("codec.gather_index_keys", seed, KV)
    for name, wanted in (("no_slots", 0), ("one_slot", 1), ("repeated_slots", 30), ("all_missing", 4)):

        def slots(draws: Draws, count: int, name: str = name, wanted: int = wanted) -> torch.Tensor:
            slot_n = draws.integers("slots", 0, count, wanted)
            if name == "all_missing":
                return torch.full_like(slot_n, -1)
            if wanted > 2:
                slot_n[1], slot_n[2], slot_n[3] = -1, count - 1, 0
            return slot_n

        by_rows = name == "repeated_slots"
        window.add(
            name,
            lambda draws, options, slots=slots: OpCall(  # type: ignore[misc]
                window.op,
                {"cache": window_cache(draws, options, poisoned=False), "slot_n": slots(draws, SLOTS * RING)},
            ),
            by_rows=by_rows,
        )
        entries.add(
            name,
            lambda draws, options, slots=slots: OpCall(  # type: ignore[misc]
                entries.op,
                {"cache": entry_cache(draws, options, poisoned=False), "slot_n": slots(draws, BLOCKS * PER_BLOCK)},
            ),
            by_rows=by_rows,
        )
        keys.add(
            name,
            lambda draws, options, slots=slots: OpCall(  # type: ignore[misc]
                keys.op,
                {"cache": index_cache(draws, options, poisoned=False), "slot_n": slots(draws, BLOCKS * PER_BLOCK)},
            ),
            by_rows=by_rows,
        )
    window.add("missing_slots_over_nan", lambda draws, options: _missing_over_nan(draws, options, window.op))
    entries.add("slots_past_2_31_by_virtual_strides", _virtual, options=ONCE)
    yield from window
    yield from entries
    yield from keys


def _missing_over_nan(draws: Draws, options: OpOptions, op: str) -> OpCall:
    """Slot -1 must not be read as the last slot, which holds NaN."""
    cache = window_cache(draws, options, poisoned=False)
    cache.bytes_ZRb[-1, -1] = NAN_BYTE
    return OpCall(op, {"cache": cache, "slot_n": torch.tensor([3, -1, 0, -1])})


def _virtual(draws: Draws, options: OpOptions) -> OpCall:
    """Every block is the same memory (stride 0), so that slots beyond 2^31 exist at no cost."""
    cache = entry_cache(draws, options, poisoned=False)
    many = cache.bytes_NEb[:1].expand(2**30, -1, -1)
    slot_n = torch.tensor([0, 2**31 + 1, 2**32 - 1, -1, 2**31 - 1])
    return OpCall("codec.gather_entries", {"cache": EntryCache(many, cache.format, cache.ratio), "slot_n": slot_n})
