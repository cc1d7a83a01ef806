"""Interpreted mode: the same kernels on CPU tensors, for tests and study on a machine without a GPU.

Whoever can interpret Triton kernels with the numbers of compiled code registers itself as a *Triton kit* in the
entry-point group ``deepinfer.triton_kits``; this package never imports one by name. The kit is a module with the
members of :class:`TritonKit`. ``DEEPINFER_NVIDIA_INTERPRET=1`` asks for the mode; the driver then opens the kit's
interpreter when its ops are built, for the rest of the process; it says so loudly when it is constructed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, Protocol, cast

from deepinfer.accelerator.interface import Reason
from deepinfer.errors import DeepInferError, DriverUnavailableError
from deepinfer.settings import Settings

KITS: Final = "deepinfer.triton_kits"
VARIABLE: Final = "DEEPINFER_NVIDIA_INTERPRET"
_LOG: Final = logging.getLogger("deepinfer.driver.nvidia")


class TritonKit(Protocol):
    """What this driver uses of a kit."""

    def require_proved_version(self) -> None:
        """Raise a DeepInferError unless the interpreter is right on the installed Triton."""

    def interpret_from_here(self) -> None:
        """Run every launch of this process on CPU tensors from here on; no work where that is so already."""

    def compile_request(
        self,
        kernel: Any,
        signature: Mapping[str, str],
        constexprs: Mapping[str, object],
        *,
        arch: int,
        num_warps: int,
        num_stages: int,
        aligned: Iterable[str],
        label: str,
    ) -> Any:
        """Describe a compilation."""

    def compile_kernels(self, requests: Sequence[Any], *, workers: int, cache: Path | None) -> Sequence[Any]:
        """Compile in processes of their own; a result or a failure each."""


def is_wanted() -> bool:
    """Return True when the environment asks for interpreted mode."""
    return Settings.from_environment().nvidia_interpret


def triton_kit() -> TritonKit:
    """Return the installed kit; DriverUnavailableError when there is none, several, or it does not load."""
    found = tuple(entry_points(group=KITS))
    if len(found) != 1:
        names = ", ".join(point.value for point in found) or "none"
        raise DriverUnavailableError(
            f"interpreting or compiling kernels needs one Triton kit (entry-point group {KITS!r}); installed: {names}. "
            f"Install deepinfer-multibackend anew"
        )
    try:
        return cast("TritonKit", found[0].load())
    except ImportError as error:
        raise DriverUnavailableError(f"the Triton kit {found[0].value} does not load: {error}") from error


def problem() -> Reason | None:
    """Return why kernels cannot be interpreted here, or None."""
    try:
        triton_kit().require_proved_version()
    except DeepInferError as error:
        return Reason(str(error), f"unset {VARIABLE}, or run in an environment with triton==3.9.0")
    return None


def announce() -> None:
    """Say loudly that nothing of this run is a GPU's."""
    _LOG.warning(
        "%s=1: kernels of the NVIDIA driver are INTERPRETED on the CPU, some thousand times slower than on a GPU. This "
        "is for tests and study only; nothing that runs here says that a GPU would do the same.",
        VARIABLE,
    )


def begin() -> None:
    """Open the kit's interpreter for the rest of the process; no work where it is open."""
    triton_kit().interpret_from_here()
