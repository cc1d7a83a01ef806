"""Which file holds which tensor: the index decides, and everything that contradicts it is reported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from deepinfer.model.checkpoint.headers import ShardHeader, StoredEntry, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_LISTED_NAMES = 8


@dataclass(frozen=True, slots=True)
class ShardScan:
    """What a directory holds, from headers alone.

    Attributes:
        headers: the shards that the checkpoint consists of, by file name, in name order.
        tensors: every tensor that is served, and the file it is served from.
        unreadable_names: tensors that the index places in a missing or damaged shard.
        problems: why the checkpoint must be refused; empty if the shards are sound.
        notices: what is odd and harmless, each said once.
    """

    headers: dict[str, ShardHeader]
    tensors: dict[str, tuple[str, StoredEntry]]
    unreadable_names: frozenset[str]
    problems: tuple[str, ...]
    notices: tuple[str, ...]


def scan_shards(directory: Path) -> ShardScan:
    """Read every header of a checkpoint directory and decide where each tensor is served from."""
    files = sorted(path.name for path in directory.glob("*.safetensors"))
    problems: list[str] = []
    notices: list[str] = []
    index_path = directory / INDEX_NAME
    if index_path.exists():
        weight_map = _read_index(index_path, problems, notices)
        if weight_map is None:
            return ShardScan({}, {}, frozenset(), tuple(problems), ())
        return _scan_indexed(directory, files, weight_map, problems, notices)
    if len(files) != 1:
        found = f"{len(files)} safetensors files ({shorten(files)})" if files else "no safetensors file"
        problems.append(
            f"{directory}: {found} and no {INDEX_NAME}; "
            "a checkpoint is one safetensors file, or shards with their index"
        )
        return ShardScan({}, {}, frozenset(), tuple(problems), ())
    header = read_header(directory / files[0])
    tensors = {name: (header.file, entry) for name, entry in header.entries.items()}
    return ShardScan({header.file: header}, tensors, frozenset(), header.problems, ())


def shorten(names: list[str]) -> str:
    """Join some names, the first few in full and the rest as a count."""
    text = ", ".join(names[:_LISTED_NAMES])
    return text if len(names) <= _LISTED_NAMES else f"{text} and {len(names) - _LISTED_NAMES} more"


def _read_index(path: Path, problems: list[str], notices: list[str]) -> dict[str, str] | None:
    try:
        decoded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(f"{INDEX_NAME}: cannot be read: {error.strerror or error}")
        return None
    except ValueError as error:
        problems.append(f"{INDEX_NAME}: is not JSON text: {error}")
        return None
    weight_map = decoded.get("weight_map") if isinstance(decoded, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        problems.append(f"{INDEX_NAME}: has no weight_map object that places tensors in files")
        return None
    placed: dict[str, str] = {}
    for name, file in weight_map.items():
        # An index may only speak of its own directory.
        if not isinstance(file, str) or PurePosixPath(file).name != file or not file.endswith(".safetensors"):
            problems.append(f"{INDEX_NAME}: {name}: {file!r} is not the name of a safetensors file beside the index")
        else:
            placed[name] = file
    metadata = decoded.get("metadata")
    if isinstance(metadata, dict) and not isinstance(metadata.get("total_size", 0), int):
        notices.append(f"{INDEX_NAME}: total_size {metadata['total_size']!r} is not a number of bytes")
    return placed


def _scan_indexed(
    directory: Path, files: list[str], weight_map: dict[str, str], problems: list[str], notices: list[str]
) -> ShardScan:
    names_of: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        names_of.setdefault(file, []).append(name)
    headers: dict[str, ShardHeader] = {}
    unreadable: set[str] = set()
    for file in sorted(names_of):
        if file not in files:
            problems.append(
                f"{file}: missing; the index places {len(names_of[file])} tensors there: {shorten(names_of[file])}"
            )
            unreadable.update(names_of[file])
            continue
        headers[file] = read_header(directory / file)
        problems += headers[file].problems
        if headers[file].problems:
            unreadable.update(names_of[file])
    tensors: dict[str, tuple[str, StoredEntry]] = {}
    for name, file in weight_map.items():
        if name in unreadable:
            continue
        entry = headers[file].entries.get(name)
        if entry is not None:
            tensors[name] = (file, entry)
            continue
        others = [other for other, header in headers.items() if name in header.entries]
        where = f"; {shorten(others)} holds one, but the index decides" if others else ""
        problems.append(f"{file}: {name}: listed by the index and absent from the file{where}")
        unreadable.add(name)
    _report_unlisted(headers, weight_map, problems, notices)
    notices += [
        f"{file}: not mentioned by the index, so nothing is read from it{_repeats(directory, file, weight_map)}"
        for file in files
        if file not in names_of
    ]
    return ShardScan(headers, tensors, frozenset(unreadable), tuple(problems), tuple(notices))


def _report_unlisted(
    headers: dict[str, ShardHeader], weight_map: dict[str, str], problems: list[str], notices: list[str]
) -> None:
    for file, header in headers.items():
        for name in header.entries:
            if name not in weight_map:
                problems.append(f"{file}: {name}: in the file and not listed by the index")
            elif weight_map[name] != file:
                notices.append(f"{file}: {name}: unused second copy; the index takes it from {weight_map[name]}")


def _repeats(directory: Path, file: str, weight_map: dict[str, str]) -> str:
    held = list(read_header(directory / file).entries)
    repeated = [name for name in held if name in weight_map]
    return f" (it holds second copies of {shorten(repeated)})" if repeated else ""
