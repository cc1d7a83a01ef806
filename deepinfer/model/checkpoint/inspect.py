"""A checkpoint described from its headers alone: what is there, and everything that is wrong with it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from deepinfer.errors import ConfigurationError
from deepinfer.model.checkpoint.matching import match_inventory
from deepinfer.model.checkpoint.shards import ShardScan, scan_shards
from deepinfer.model.config import ModelConfig
from deepinfer.model.inventory import CheckpointForm, Group, parameters
from deepinfer.model.roles import LayerRole, derive_roles


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """One file of the checkpoint."""

    file: str
    num_bytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True)
class KindSummary:
    """The served tensors of one group and one stored type; group ``other`` holds names outside the inventory."""

    group: str
    dtype: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointSummary:
    """What `inspect_checkpoint` found; the checkpoint can be opened if and only if ``problems`` is empty."""

    directory: str
    config: ModelConfig | None
    form: CheckpointForm | None
    roles: tuple[LayerRole, ...]
    shards: tuple[ShardSummary, ...]
    kinds: tuple[KindSummary, ...]
    num_tensors: int
    num_bytes: int
    notices: tuple[str, ...]
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Give the summary as what JSON can hold."""
        return {
            "directory": self.directory,
            "config": None if self.config is None else self.config.to_hf(),
            "form": self.form,
            "roles": [asdict(role) for role in self.roles],
            "shards": [asdict(shard) for shard in self.shards],
            "kinds": [asdict(kind) for kind in self.kinds],
            "num_tensors": self.num_tensors,
            "num_bytes": self.num_bytes,
            "notices": list(self.notices),
            "problems": list(self.problems),
        }


def inspect_checkpoint(directory: str | Path, *, groups: tuple[Group, ...] = ("text",)) -> CheckpointSummary:
    """Describe a checkpoint directory without reading tensor data; problems are listed, never raised.

    Args:
        directory: the checkpoint.
        groups: the parts of the model that must be complete, as for `Checkpoint.open`.
    """
    root = Path(directory)
    if not root.is_dir():
        return _summary(root, None, None, None, ["is not a directory; give the directory that holds config.json"], [])
    config: ModelConfig | None = None
    problems: list[str] = []
    try:
        config = ModelConfig.from_file(root / "config.json")
    except ConfigurationError as error:
        problems += [f"config.json: {problem}" for problem in error.problems]
    scan = scan_shards(root)
    problems += scan.problems
    notices = list(scan.notices)
    form: CheckpointForm | None = None
    if config is not None and scan.headers:
        match = match_inventory(config, scan, groups)
        form = match.form
        problems += match.problems
        notices += match.notices
    return _summary(root, config, form, scan, problems, notices)


def _summary(
    root: Path,
    config: ModelConfig | None,
    form: CheckpointForm | None,
    scan: ShardScan | None,
    problems: list[str],
    notices: list[str],
) -> CheckpointSummary:
    kinds = () if scan is None else _kinds(config, form, scan)
    shards = (
        ()
        if scan is None
        else tuple(ShardSummary(header.file, header.num_bytes, len(header.entries)) for header in scan.headers.values())
    )
    return CheckpointSummary(
        directory=str(root),
        config=config,
        form=form,
        roles=() if config is None else derive_roles(config),
        shards=shards,
        kinds=kinds,
        num_tensors=sum(kind.num_tensors for kind in kinds),
        num_bytes=sum(kind.num_bytes for kind in kinds),
        notices=tuple(notices),
        problems=tuple(problems),
    )


def _kinds(config: ModelConfig | None, form: CheckpointForm | None, scan: ShardScan) -> tuple[KindSummary, ...]:
    group_of: dict[str, str] = {}
    if config is not None and form is not None:
        for parameter in parameters(config):
            for entry in parameter.entries(form):
                group_of[entry.name] = entry.group
    counts: dict[tuple[str, str], tuple[int, int]] = {}
    for name, (_, stored) in scan.tensors.items():
        key = (group_of.get(name, "other"), stored.dtype)
        tensors, size = counts.get(key, (0, 0))
        counts[key] = (tensors + 1, size + stored.num_bytes)
    return tuple(KindSummary(*key, *counts[key]) for key in sorted(counts))
