"""A checkpoint opened for reading: everything is checked first, then tensors are mapped on demand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import torch

from deepinfer.errors import ArgumentError, CheckpointError
from deepinfer.model.checkpoint.headers import ShardHeader, StoredEntry
from deepinfer.model.checkpoint.mapped import MappedShard
from deepinfer.model.checkpoint.matching import match_inventory
from deepinfer.model.checkpoint.progress import Progress, ProgressCallback
from deepinfer.model.checkpoint.shards import scan_shards
from deepinfer.model.config import ModelConfig
from deepinfer.model.inventory import CheckpointForm, Group, Parameter

WeightFormat = Literal["float32", "bfloat16", "fp8_block32", "mxfp4", "engram_fp8"]

_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A weight as the checkpoint stores it; the tensors are views of the mapped file, not copies.

    Attributes:
        name: the weight's name without ``.weight``.
        format: how to read ``weight`` and ``scale``.
        weight: the stored values or codes.
        scale: the stored scales, None for the plain formats.
        out_features: rows of the logical matrix; of a vector, its length.
        in_features: columns of the logical matrix, before packing; 1 for a vector.
    """

    name: str
    format: WeightFormat
    weight: torch.Tensor
    scale: torch.Tensor | None
    out_features: int
    in_features: int


class Checkpoint:
    """A sound checkpoint directory; tensors are read lazily from memory-mapped files.

    Views stay valid as long as they are referenced. Writing to one changes neither the file nor later reads of
    other processes, but does change what this process sees: treat them as read-only.
    """

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        form: CheckpointForm,
        headers: Mapping[str, ShardHeader],
        tensors: Mapping[str, tuple[str, StoredEntry]],
        parameters: Mapping[str, Parameter],
        notices: tuple[str, ...],
        unused: tuple[str, ...],
    ) -> None:
        """Hold what `open` has checked; callers use `open`."""
        self.directory = directory
        self.config = config
        self.form: CheckpointForm = form
        self.notices = notices
        self.unused_names = unused
        self._tensors = dict(tensors)
        self._parameters = dict(parameters)
        used_files = sorted({file for file, _ in self._tensors.values()})
        self._shards = {file: MappedShard(directory / file, headers[file].data_start) for file in used_files}

    @classmethod
    def open(cls, directory: str | Path, *, groups: tuple[Group, ...] = ("text",)) -> Self:
        """Check a directory and open it; nothing is served unless everything that is needed is there and sound.

        Args:
            directory: holds ``config.json`` and one safetensors file, or shards with their index.
            groups: the parts of the model that will be read and so must be complete. Known tensors of other parts
                are named in ``notices`` and ``unused_names`` and are not served.

        Raises:
            ConfigurationError: if ``config.json`` is absent or refused.
            CheckpointError: listing every damaged shard and every missing, unknown, mis-shaped or mis-typed tensor.
        """
        root = Path(directory)
        if not root.is_dir():
            raise CheckpointError(str(root), ["is not a directory; give the directory that holds config.json"])
        config = ModelConfig.from_file(root / "config.json")
        scan = scan_shards(root)
        if not scan.headers:
            raise CheckpointError(str(root), scan.problems)
        match = match_inventory(config, scan, groups)
        problems = (*scan.problems, *match.problems)
        if problems:
            raise CheckpointError(str(root), problems)
        tensors = {
            entry.name: scan.tensors[entry.name]
            for parameter in match.parameters.values()
            for entry in parameter.entries(match.form)
        }
        notices = (*scan.notices, *match.notices)
        return cls(root, config, match.form, scan.headers, tensors, match.parameters, notices, match.unused)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor that is served, in the order of the forward pass."""
        return tuple(self._tensors)

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter that is served, in the order of the forward pass."""
        return tuple(self._parameters.values())

    def tensor(self, name: str) -> torch.Tensor:
        """Give a view of one stored tensor.

        Raises:
            ArgumentError: if the opened groups have no such tensor.
        """
        if name not in self._tensors:
            raise ArgumentError("Checkpoint.tensor", [self._no_such(name)])
        file, entry = self._tensors[name]
        return self._shards[file].tensor(entry)

    def weight(self, stem: str) -> StoredTensor:
        """Give one weight with its scales, by its name without ``.weight`` (or a full name that has no such ending).

        Raises:
            ArgumentError: if the opened groups have no such parameter.
        """
        parameter = self._parameters.get(f"{stem}.weight", self._parameters.get(stem))
        if parameter is None:
            raise ArgumentError("Checkpoint.weight", [self._no_such(f"{stem}.weight")])
        weight = self.tensor(parameter.name)
        rows, columns = parameter.shape if len(parameter.shape) == 2 else (parameter.shape[0], 1)
        if len(parameter.entries(self.form)) == 2:
            scale: torch.Tensor | None = self.tensor(parameter.scale_name)
            stored_format: WeightFormat = parameter.storage
        else:
            scale = None
            stored_format = "bfloat16" if weight.dtype == torch.bfloat16 else "float32"
        return StoredTensor(parameter.name.removesuffix(".weight"), stored_format, weight, scale, rows, columns)

    def load_all(
        self,
        names: Iterable[str] | None = None,
        progress: ProgressCallback | None = None,
        *,
        threads: int | None = None,
        convert: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Read tensors into memory in parallel; either all of them are returned, or an error leaves nothing behind.

        Args:
            names: which tensors, default all that are served; the result keeps this order.
            progress: called from this thread after every tensor.
            threads: readers at a time.
            convert: turns a mapped view into what to keep, for example a copy on a device; default a copy in memory.
        """
        wanted = list(dict.fromkeys(self.names if names is None else names))
        unknown = [self._no_such(name) for name in wanted if name not in self._tensors]
        if unknown:
            raise ArgumentError("Checkpoint.load_all", unknown)
        keep = convert if convert is not None else _copy

        def read(name: str) -> torch.Tensor:
            return keep(name, self.tensor(name))

        loaded = self._in_parallel(wanted, read, progress, threads)
        return {name: loaded[name] for name in wanted}

    def load_into(
        self,
        targets: Mapping[str, torch.Tensor],
        progress: ProgressCallback | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        """Overwrite every element of every target with the stored tensor of its name, converting the type if needed.

        Args:
            targets: allocated tensors by name; one for every tensor that is served, so that none stays unset.
            progress: called from this thread after every tensor.
            threads: readers at a time.

        Raises:
            CheckpointError: before anything is written, if a name is absent on either side or a shape differs.
        """
        problems = [
            f"{name}: the checkpoint has it and no target was given" for name in self.names if name not in targets
        ]
        for name, target in targets.items():
            if name not in self._tensors:
                problems.append(f"{name}: a target was given, but {self._no_such(name)}")
            elif tuple(target.shape) != (shape := self._tensors[name][1].shape):
                problems.append(f"{name}: the target has shape {list(target.shape)}, the checkpoint {list(shape)}")
        if problems:
            raise CheckpointError(str(self.directory), problems)

        def fill(name: str) -> torch.Tensor:
            return targets[name].copy_(self.tensor(name))

        self._in_parallel(list(targets), fill, progress, threads)

    def _in_parallel(
        self,
        names: list[str],
        work: Callable[[str], torch.Tensor],
        progress: ProgressCallback | None,
        threads: int | None,
    ) -> dict[str, torch.Tensor]:
        results: dict[str, torch.Tensor] = {}
        sizes = {name: self._tensors[name][1].num_bytes for name in names}
        total_bytes, done_bytes = sum(sizes.values()), 0
        executor = ThreadPoolExecutor(threads or min(_MAX_THREADS, os.cpu_count() or 1))
        try:
            futures: dict[Future[torch.Tensor], str] = {executor.submit(work, name): name for name in names}
            for future in as_completed(futures):
                name = futures[future]
                results[name] = future.result()
                done_bytes += sizes[name]
                if progress is not None:
                    progress(Progress(name, len(results), len(names), done_bytes, total_bytes))
        finally:
            # After an error or Ctrl-C the queued reads are pointless; running ones end by themselves.
            executor.shutdown(wait=True, cancel_futures=True)
        return results

    def _no_such(self, name: str) -> str:
        if name in self.unused_names:
            return f"{name!r} is in the checkpoint but its group was not opened; name the group in Checkpoint.open"
        return f"{self.directory} in {self.form} form has no tensor {name!r}"


def _copy(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()
