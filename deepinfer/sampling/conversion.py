"""Turn what a user passed into the stored form of a parameter, or say in words why its type is wrong."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import NoReturn, TypeVar

import numpy as np

_SHOWN_CHARACTERS = 80

Value = TypeVar("Value")


def integer(value: object) -> int:
    """Return an int (numpy's integers included); booleans, floats and text are wrong types."""
    if isinstance(value, (bool, np.bool_)):
        _refuse(value, "an integer")
    try:
        return operator.index(value)  # type: ignore[arg-type]  # the TypeError of a wrong type is the check itself
    except TypeError:
        _refuse(value, "an integer")


def number(value: object) -> float:
    """Return a float of any real number; one too large for a float becomes infinite, which no range admits."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Real):
        _refuse(value, "a number")
    try:
        return float(value)
    except OverflowError:
        return -math.inf if value < 0 else math.inf


def boolean(value: object) -> bool:
    """Return a bool; integers are a wrong type, so that a count given in a flag's place is seen."""
    if not isinstance(value, (bool, np.bool_)):
        _refuse(value, "True or False")
    return bool(value)


def optional(convert: Callable[[object], Value]) -> Callable[[object], Value | None]:
    """Return a converter that lets None through."""
    return lambda value: None if value is None else convert(value)


def integers(value: object) -> tuple[int, ...]:
    """Return a tuple of integers; None is the empty one."""
    return _sequence(value, integer, "a list of token ids")


def optional_integers(value: object) -> tuple[int, ...] | None:
    """Return a tuple of integers, or None, which here differs from the empty one."""
    return None if value is None else integers(value)


def strings(value: object) -> tuple[str, ...]:
    """Return a tuple of strings; one string alone is a tuple of one, None the empty one."""
    return (value,) if isinstance(value, str) else _sequence(value, _string, "a string or a list of strings")


def bias(value: object) -> dict[int, float] | None:
    """Return a copy of a mapping from token id to number, or None."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        _refuse(value, "a mapping from token id to number")
    return dict(zip(_sequence(value.keys(), integer, ""), _sequence(value.values(), number, ""), strict=True))


def _string(value: object) -> str:
    if not isinstance(value, str):
        _refuse(value, "a string")
    return value


def _sequence(value: object, convert: Callable[[object], Value], expected: str) -> tuple[Value, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        _refuse(value, expected)
    found: list[Value] = []
    for place, item in enumerate(value):
        try:
            found.append(convert(item))
        except TypeError as error:
            raise TypeError(f"item {place} is of a wrong type: {error}") from None
    return tuple(found)


def _refuse(value: object, expected: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[: _SHOWN_CHARACTERS - 3] + "..."
    raise TypeError(f"{shown} is of type {type(value).__name__}; give {expected}")
