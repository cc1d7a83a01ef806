"""What a launch was given, in a form that two runs can be compared by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor as a kernel saw it.

    Attributes:
        name: the parameter; a tuple's or descriptor's part is ``name[0]`` or ``name.base``.
        pointer: address of its first element.
    """

    name: str
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class ScalarArgument:
    """A number, a text or None that was passed: at run time, as a constexpr, or as an option such as ``num_warps``."""

    name: str
    value: object


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: equal launches do the same work on the same addresses."""

    kernel: str
    grid: tuple[int, int, int]
    constexprs: tuple[ScalarArgument, ...]
    options: tuple[ScalarArgument, ...]
    tensors: tuple[TensorArgument, ...]
    scalars: tuple[ScalarArgument, ...]

    @property
    def pointers(self) -> tuple[int, ...]:
        """The addresses, in the order of the parameters."""
        return tuple(tensor.pointer for tensor in self.tensors)


def launch_differences(
    first: Sequence[Launch], second: Sequence[Launch], *, ignore_pointers: bool = False
) -> tuple[str, ...]:
    """Every difference between two runs, in order; empty if a graph of the first could stand for the second.

    A captured graph replays the addresses of its capture, so pointers count unless ``ignore_pointers``.
    """
    problems = []
    if len(first) != len(second):
        problems.append(f"{len(first)} launches against {len(second)}")
    for position, (one, other) in enumerate(zip(first, second, strict=False)):
        where = f"launch {position} ({one.kernel})"
        for field in fields(Launch):
            before, after = getattr(one, field.name), getattr(other, field.name)
            if field.name in ("constexprs", "options", "tensors", "scalars"):
                problems += _argument_differences(where, field.name, before, after, ignore_pointers=ignore_pointers)
            elif before != after:
                problems.append(f"{where}: {field.name} {before!r} against {after!r}")
    return tuple(problems)


def _argument_differences(
    where: str,
    kind: str,
    before: Sequence[TensorArgument | ScalarArgument],
    after: Sequence[TensorArgument | ScalarArgument],
    *,
    ignore_pointers: bool,
) -> list[str]:
    ours, theirs = ({item.name: item for item in items} for items in (before, after))
    problems = [f"{where}: {kind} {name!r} only in one run" for name in sorted(ours.keys() ^ theirs.keys())]
    for name, item in ours.items():
        if name not in theirs:
            continue
        for field in fields(item):
            if field.name == "pointer" and ignore_pointers:
                continue
            one, other = getattr(item, field.name), getattr(theirs[name], field.name)
            if one != other:
                shown = (f"{one:#x}", f"{other:#x}") if field.name == "pointer" else (repr(one), repr(other))
                problems.append(f"{where}: {name!r} has {field.name} {shown[0]} against {shown[1]}")
    return problems
