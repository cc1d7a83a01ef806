"""Records of lists that grow: one costs nothing to make, and a copy only when somebody looks at it."""

from __future__ import annotations

from itertools import islice
from typing import Any, Generic, TypeVar, cast, overload

Item = TypeVar("Item")
Value = TypeVar("Value")


class Prefix(Generic[Item]):
    """The items that an append-only list holds at this moment; what is appended later does not show."""

    __slots__ = ("_items", "_length")

    def __init__(self, items: list[Item], length: int) -> None:
        """Take the first ``length`` items of a list that will only ever be appended to; O(1)."""
        self._items = items
        self._length = length

    def as_tuple(self) -> tuple[Item, ...]:
        """Return the items; O(length)."""
        return tuple(islice(self._items, self._length))

    def since(self, start: int) -> tuple[Item, ...]:
        """Return the items from ``start`` on; O(their number)."""
        return tuple(self._items[start : self._length])

    def __reduce__(self) -> tuple[type[tuple[Item, ...]], tuple[tuple[Item, ...]]]:
        """Leave as a plain tuple when copied or pickled."""
        return tuple, (self.as_tuple(),)


class GrowingField(Generic[Value]):
    """A dataclass field of type ``Value``, a tuple (or None), that may also be set to a :class:`Prefix`.

    A request of L tokens gives L records. Were each to copy its tokens, they would cost L * L / 2 copies; so the tuple
    is made at the first reading, and a record that nobody reads stays O(1).
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._key = f"_{name}"

    @overload
    def __get__(self, instance: None, owner: type) -> GrowingField[Value]: ...

    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> GrowingField[Value] | Value:
        if instance is None:  # dataclasses ask the class for a default
            raise AttributeError(f"{owner.__name__}.{self._name} has no default")
        held = instance.__dict__
        value = held[self._key]
        if isinstance(value, Prefix):
            value = held[self._key] = value.as_tuple()
        return cast("Value", value)

    def __set__(self, instance: object, value: Value | Prefix[Any]) -> None:
        instance.__dict__[self._key] = value


def items_since(instance: object, name: str, start: int) -> tuple[Any, ...] | None:
    """Return the items of a growing field from ``start`` on, None for None; the others are not copied."""
    value = instance.__dict__[f"_{name}"]
    if isinstance(value, Prefix):
        return value.since(start)
    return None if value is None else tuple(value[start:])
