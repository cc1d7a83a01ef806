"""Prototypes of aclnn operators in one line each, since the headers are not in the wheel.

    aclnnAdd(self, other, scalar alpha, out*)

A bare name is a tensor; `list`, `ints`, `bools`, `floats`, `scalar`, `scalars`, `int`, `int32`, `byte`, `bool`,
`double`, `float` and `text` say what else it is. `?` after a name: null is allowed. `*`: the operator writes it. `&`:
it reads and writes it. `!`: the kernel gets the storage of a layout that strides cannot describe, in storage shape.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from host_cann.descriptors import DescriptorKind
from host_cann.errors import HostCannError

_LINE = re.compile(r"(aclnn\w+)\((.*)\)", re.DOTALL)
_PARAMETER = re.compile(r"(?:(\w+) )?(\w+)([?*&!]*)")


class Passing(Enum):
    """How a parameter travels."""

    DESCRIPTOR = "descriptor"
    INTEGER = "int"
    INTEGER_32 = "int32"
    BYTE = "byte"
    BOOLEAN = "bool"
    DOUBLE = "double"
    FLOAT = "float"
    TEXT = "text"


_KINDS = {
    None: (Passing.DESCRIPTOR, DescriptorKind.TENSOR),
    "list": (Passing.DESCRIPTOR, DescriptorKind.TENSOR_LIST),
    "ints": (Passing.DESCRIPTOR, DescriptorKind.INTEGERS),
    "bools": (Passing.DESCRIPTOR, DescriptorKind.BOOLEANS),
    "floats": (Passing.DESCRIPTOR, DescriptorKind.FLOATS),
    "scalar": (Passing.DESCRIPTOR, DescriptorKind.SCALAR),
    "scalars": (Passing.DESCRIPTOR, DescriptorKind.SCALAR_LIST),
    "int": (Passing.INTEGER, DescriptorKind.NOTHING),
    "int32": (Passing.INTEGER_32, DescriptorKind.NOTHING),
    "byte": (Passing.BYTE, DescriptorKind.NOTHING),
    "bool": (Passing.BOOLEAN, DescriptorKind.NOTHING),
    "double": (Passing.DOUBLE, DescriptorKind.NOTHING),
    "float": (Passing.FLOAT, DescriptorKind.NOTHING),
    "text": (Passing.TEXT, DescriptorKind.NOTHING),
}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operator."""

    name: str
    passing: Passing
    kind: DescriptorKind
    is_optional: bool
    is_read: bool
    is_written: bool
    is_storage: bool = False


@dataclass(frozen=True, slots=True)
class Prototype:
    """An operator's name and parameters, in the order of its C function."""

    operator: str
    parameters: tuple[Parameter, ...]

    @property
    def written(self) -> tuple[Parameter, ...]:
        """The parameters that receive results."""
        return tuple(parameter for parameter in self.parameters if parameter.is_written)


def parse(line: str) -> Prototype:
    """Return the prototype that ``line`` writes down."""
    found = _LINE.fullmatch(" ".join(line.split()))
    if found is None:
        raise HostCannError(f"{line!r} is no prototype; write aclnnName(a, scalar b, out*)")
    parameters = []
    for text in filter(None, (part.strip() for part in found[2].split(","))):
        matched = _PARAMETER.fullmatch(text)
        if matched is None or matched[1] not in _KINDS:
            raise HostCannError(f"{text!r} in {line!r} is no parameter; kinds are {sorted(filter(None, _KINDS))}")
        passing, kind = _KINDS[matched[1]]
        marks = matched[3]
        parameters.append(
            Parameter(
                matched[2], passing, kind, "?" in marks, "*" not in marks, "*" in marks or "&" in marks, "!" in marks
            )
        )
    return Prototype(found[1], tuple(parameters))
