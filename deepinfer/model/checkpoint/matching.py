"""Compares what a checkpoint holds with what its configuration needs, and tells the form it is written in.

A checkpoint has one form throughout: ``released`` (fp8 blocks, fp4 experts, scales beside them), ``float32`` or
``bfloat16`` (plain weights without scales). The form is the one that contradicts the fewest tensors; every tensor that
contradicts it is a problem. Two liberties change no number that is used: in the ``bfloat16`` form a parameter that the
released form keeps in float32 may be of either type, and the unused vision tower may be in any plain float type.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from deepinfer.model.checkpoint.headers import StoredEntry
from deepinfer.model.checkpoint.shards import ShardScan, shorten
from deepinfer.model.config import ModelConfig
from deepinfer.model.inventory import FORMS, GROUPS, CheckpointForm, Group, Parameter, TensorEntry, parameters

_VISION_PREFIXES = ("vision.", "aligner.", "image_")
_PLAIN_FLOATS = frozenset({"F32", "BF16", "F16"})
_LISTED_PROBLEMS = 50


@dataclass(frozen=True, slots=True)
class Match:
    """The outcome of comparing a checkpoint with its configuration.

    Attributes:
        form: how the checkpoint is written.
        parameters: the parameters that are present and sound, by name.
        problems: missing, unknown, mis-shaped and mis-typed tensors.
        notices: known tensors that are not used, one line per group.
        unused: the names behind those lines, sorted.
    """

    form: CheckpointForm
    parameters: dict[str, Parameter]
    problems: tuple[str, ...]
    notices: tuple[str, ...]
    unused: tuple[str, ...]


def match_inventory(config: ModelConfig, scan: ShardScan, used: tuple[Group, ...]) -> Match:
    """Compare every tensor of ``scan`` with the inventory of ``config``; ``used`` groups must be complete."""
    known = parameters(config)
    form = _detect_form(known, scan.tensors)
    present_in = {group: _is_present(known, group, scan) for group in GROUPS}
    missing: list[str] = []
    wrong: list[str] = []
    sound: dict[str, Parameter] = {}
    expected_names: set[str] = set()
    unused: dict[Group, list[str]] = {group: [] for group in GROUPS}
    for parameter in known:
        entries = parameter.entries(form)
        problems_before = len(missing) + len(wrong)
        for wanted in entries:
            expected_names.add(wanted.name)
            if wanted.name in scan.unreadable_names:
                continue
            if wanted.name not in scan.tensors:
                # An unused group may be absent as a whole; a part of it is a damaged checkpoint.
                if parameter.group in used or present_in[parameter.group]:
                    missing.append(f"{wanted.name}: missing; {wanted.dtype} {list(wanted.shape)} is needed")
                continue
            file, stored = scan.tensors[wanted.name]
            wrong += _contradictions(file, stored, wanted, parameter, form)
            if parameter.group not in used:
                unused[parameter.group].append(wanted.name)
        if parameter.group in used and len(missing) + len(wrong) == problems_before:
            sound[parameter.name] = parameter
    unknown: list[str] = []
    for name, (file, _) in scan.tensors.items():
        if name in expected_names:
            continue
        if config.vision_config is None and name.startswith(_VISION_PREFIXES) and "vision" not in used:
            unused["vision"].append(name)
        else:
            unknown.append(f"{file}: {name}: unknown; this configuration has no such tensor in its {form} form")
    problems = [
        *capped(missing, "missing tensors"),
        *capped(wrong, "wrong tensors"),
        *capped(unknown, "unknown tensors"),
    ]
    notices = tuple(
        f"{len(names)} tensors of the {group} group are known and not used: {shorten(names)}"
        for group, names in unused.items()
        if names
    )
    return Match(
        form, sound, tuple(problems), notices, tuple(sorted(name for names in unused.values() for name in names))
    )


def capped(problems: list[str], what: str) -> list[str]:
    """Keep an error readable: the first problems of a kind in full, the rest as a count."""
    hidden = len(problems) - _LISTED_PROBLEMS
    return problems if hidden <= 0 else [*problems[:_LISTED_PROBLEMS], f"and {hidden} more {what}"]


def _detect_form(known: Collection[Parameter], tensors: Mapping[str, tuple[str, StoredEntry]]) -> CheckpointForm:
    def contradictions(form: CheckpointForm) -> int:
        count = 0
        for parameter in known:
            for wanted in parameter.entries(form):
                held = tensors.get(wanted.name)
                count += held is None or held[1].dtype not in _allowed_dtypes(wanted, parameter, form)
        return count

    return min(FORMS, key=contradictions)


def _is_present(known: Collection[Parameter], group: Group, scan: ShardScan) -> bool:
    return any(
        parameter.group == group and (parameter.name in scan.tensors or parameter.name in scan.unreadable_names)
        for parameter in known
    )


def _allowed_dtypes(wanted: TensorEntry, parameter: Parameter, form: CheckpointForm) -> Collection[str]:
    if parameter.group == "vision":
        return _PLAIN_FLOATS
    if form == "bfloat16" and parameter.storage == "float32":
        return ("F32", "BF16")
    return (wanted.dtype,)


def _contradictions(
    file: str, stored: StoredEntry, wanted: TensorEntry, parameter: Parameter, form: CheckpointForm
) -> list[str]:
    found: list[str] = []
    if stored.shape != wanted.shape:
        found.append(f"{file}: {wanted.name}: shape {list(stored.shape)}, the configuration needs {list(wanted.shape)}")
    allowed = _allowed_dtypes(wanted, parameter, form)
    if stored.dtype not in allowed:
        needed = " or ".join(sorted(allowed))
        found.append(f"{file}: {wanted.name}: type {stored.dtype}, a checkpoint in {form} form needs {needed}")
    return found
