"""The reference driver `cpu_ref`: the meaning of every op, in readable torch.

Importing this package loads nothing: the driver's module is imported when ``Driver`` is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer_cpu_ref.driver import Driver

__all__ = ["Driver"]


def __getattr__(name: str) -> object:
    if name == "Driver":
        from deepinfer_cpu_ref.driver import Driver

        return Driver
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
