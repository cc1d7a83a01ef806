"""Safetensors headers, read and checked before any tensor is served.

A header that promises more bytes than the file has would map memory beyond its end: every promise is checked
against the file's length here, so that no reader ever trusts it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

_LENGTH_BYTES = 8
# The safetensors library refuses longer headers too; the released shards stay far below.
_MAX_HEADER_BYTES = 100_000_000
_ELEMENT_BITS: dict[str, int] = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64,
}  # fmt: skip


class StoredEntry(NamedTuple):
    """One tensor of a shard, as its header describes it; offsets count from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What one shard holds; ``problems`` is empty if and only if the file can be mapped safely.

    Offsets of ``entries`` count from byte ``data_start`` of the file.
    """

    file: str
    num_bytes: int
    data_start: int = 0
    entries: dict[str, StoredEntry] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of one file; problems are collected, each naming the file and the tensor."""
    file = path.name
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            prefix = stream.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(prefix, "little")
            text = stream.read(min(header_bytes, _MAX_HEADER_BYTES, size))
    except OSError as error:
        return ShardHeader(file, 0, problems=(f"{file}: cannot be read: {error.strerror or error}",))
    if size < _LENGTH_BYTES:
        return ShardHeader(file, size, problems=(f"{file}: {size} bytes long, which is no safetensors file",))
    if header_bytes > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        problem = (
            f"{file}: announces a header of {header_bytes} bytes and {size - _LENGTH_BYTES} follow; "
            "the file is cut inside its header or is no safetensors file"
        )
        return ShardHeader(file, size, problems=(problem,))
    problems: list[str] = []
    decoded = _decode(file, text, problems)
    entries: dict[str, StoredEntry] = {}
    for name, raw in decoded:
        if name in entries:
            problems.append(f"{file}: {name}: twice in the header")
        elif name != "__metadata__":
            entry = _entry(file, name, raw, problems)
            if entry is not None:
                entries[name] = entry
    if not problems:
        problems += _layout_problems(file, entries, size - _LENGTH_BYTES - header_bytes)
    return ShardHeader(file, size, _LENGTH_BYTES + header_bytes, entries, tuple(problems))


def _decode(file: str, text: bytes, problems: list[str]) -> list[tuple[str, object]]:
    try:
        # Pairs, because a dict would hide a name that stands twice. Inner objects become pairs as well.
        decoded: object = json.loads(text.decode("utf-8"), object_pairs_hook=_Pairs)
    except ValueError as error:
        problems.append(f"{file}: the header is not JSON text: {error}")
        return []
    if not isinstance(decoded, _Pairs):
        problems.append(f"{file}: the header is a JSON {type(decoded).__name__}, an object is needed")
        return []
    return list(decoded)


class _Pairs(list[tuple[str, object]]):
    """The members of a JSON object in file order."""


def _entry(file: str, name: str, raw: object, problems: list[str]) -> StoredEntry | None:
    members = dict(raw) if isinstance(raw, _Pairs) else {}
    dtype, shape, offsets = members.get("dtype"), members.get("shape"), members.get("data_offsets")
    if (
        not isinstance(dtype, str)
        or not _is_counts(shape)
        or not _is_counts(offsets)
        or not isinstance(shape, list)
        or not isinstance(offsets, list)
        or len(offsets) != 2
        or offsets[0] > offsets[1]
    ):
        problems.append(f"{file}: {name}: the header entry lacks a usable dtype, shape or data_offsets")
        return None
    if dtype not in _ELEMENT_BITS:
        problems.append(f"{file}: {name}: dtype {dtype!r} is not a safetensors type this build knows")
        return None
    needed = prod(shape) * _ELEMENT_BITS[dtype]
    if needed != 8 * (offsets[1] - offsets[0]):
        problems.append(
            f"{file}: {name}: {dtype} {shape} needs {needed // 8} bytes, data_offsets give {offsets[1] - offsets[0]}"
        )
        return None
    return StoredEntry(name, dtype, tuple(shape), offsets[0], offsets[1])


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    )


def _layout_problems(file: str, entries: dict[str, StoredEntry], data_bytes: int) -> list[str]:
    problems: list[str] = []
    position, previous = 0, "the header"
    for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end, entry.name)):
        if entry.begin < position:
            problems.append(f"{file}: {entry.name}: its data overlap those of {previous}")
        elif entry.begin > position:
            problems.append(f"{file}: {entry.name}: {entry.begin - position} bytes before it belong to no tensor")
        if entry.end > data_bytes:
            problems.append(
                f"{file}: {entry.name}: its data end at byte {entry.end} and the file has {data_bytes}; "
                "the file is truncated, fetch it again"
            )
        if entry.end >= position:
            position, previous = entry.end, entry.name
    if data_bytes > position:
        problems.append(f"{file}: {data_bytes - position} bytes after {previous} belong to no tensor")
    return problems
