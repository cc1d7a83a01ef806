"""What an op is: a marked method of an op group, whose docstring is its whole specification.

A group class declares its ops with :func:`op`; the bodies only say that nothing implements them. A driver
subclasses the group and overrides the ops it has. What it did not override is missing, and the plan says so
before anything is served: nothing is looked up by name while a step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, NoReturn, TypeVar

from deepinfer.errors import OpRefusedError

Feature = Literal["drafts"]
"""What an engine may ask for beyond the text model; an op of a feature is needed only where it is asked for."""

_MARK = "__deepinfer_op__"

Function = TypeVar("Function", bound=Callable[..., object])


def op(function: Function) -> Function:
    """Mark a method of an :class:`OpGroup` as an op of the contract."""
    setattr(function, _MARK, True)
    return function


class OpGroup:
    """A family of ops. Subclasses in this package are the contract; drivers subclass those.

    Attributes:
        group: the first half of each op's identifier, for example ``"attention"`` in ``"attention.sparse"``.
        bound_together: names of ops of this group that exchange data which only their own implementation
            understands (prepared weights); the plan takes all of them from one place.
        feature: the feature that needs the group; None for the text model itself.
    """

    group: ClassVar[str]
    feature: ClassVar[Feature | None] = None
    bound_together: ClassVar[tuple[tuple[str, ...], ...]] = ()

    @classmethod
    def op_names(cls) -> tuple[str, ...]:
        """Return the names of all ops of the group, in the order in which the contract declares them."""
        names: dict[str, None] = {}
        for base in reversed(cls.__mro__):
            for name, member in vars(base).items():
                if getattr(member, _MARK, False):
                    names[name] = None
        return tuple(names)

    @classmethod
    def implemented(cls) -> tuple[str, ...]:
        """Return the names of the ops that this class overrides, in declared order."""
        return tuple(name for name in cls.op_names() if not getattr(getattr(cls, name), _MARK, False))


def not_implemented(group: OpGroup, name: str) -> NoReturn:
    """Raise the error of an op that nobody implements; the plan prevents this from being reached."""
    raise OpRefusedError(
        f"op '{group.group}.{name}' is not implemented by {type(group).__module__}.{type(group).__qualname__}; "
        f"name it in DEEPINFER_ALLOW_FALLBACK to run it on cpu_ref, or choose another accelerator."
    )
