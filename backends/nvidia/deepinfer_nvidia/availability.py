"""Whether the driver can run here: every layer of the stack is looked at, every absence is a reason with a remedy.

The layers, from the top: Triton, torch's CUDA build, the kernel driver, a device, its generation. Triton is not
imported for it. In interpreted mode only Triton and the kit that interprets are needed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final, Protocol

import torch

from deepinfer.accelerator.interface import Availability, Reason
from deepinfer_nvidia import architecture, interpreting, optional

OLDEST_TRITON: Final = (3, 6)
NEWEST_TRITON: Final = (3, 9)
DRIVER_LIBRARY: Final = "libcuda.so.1"
INTERPRETED_DEVICE: Final = "no GPU: kernels are interpreted on the CPU, for tests and study only"


class Machine(Protocol):
    """What availability asks of the machine; tests answer instead of it."""

    def triton_version(self) -> str | None:
        """Return the installed version of Triton, or None."""

    def torch_version(self) -> str:
        """Return the version of torch."""

    def cuda_version(self) -> str | None:
        """Return the CUDA version that torch was built for, or None."""

    def has_driver(self) -> bool:
        """Return True when the kernel driver's library can be loaded."""

    def device_count(self) -> int:
        """Return how many devices the runtime shows."""

    def device_name(self) -> str:
        """Return the name of the current device."""

    def capability(self) -> tuple[int, int]:
        """Return the compute capability of the current device."""


class ThisMachine:
    """The machine that the process runs on."""

    def triton_version(self) -> str | None:
        """See :class:`Machine`."""
        try:
            return version("triton")
        except PackageNotFoundError:
            return None

    def torch_version(self) -> str:
        """See :class:`Machine`."""
        return str(torch.__version__)

    def cuda_version(self) -> str | None:
        """See :class:`Machine`."""
        return torch.version.cuda

    def has_driver(self) -> bool:
        """See :class:`Machine`."""
        try:
            ctypes.CDLL(DRIVER_LIBRARY)
        except OSError:
            return False
        return True

    def device_count(self) -> int:
        """See :class:`Machine`."""
        return torch.cuda.device_count()

    def device_name(self) -> str:
        """See :class:`Machine`."""
        return str(torch.cuda.get_device_name())

    def capability(self) -> tuple[int, int]:
        """See :class:`Machine`."""
        return torch.cuda.get_device_capability()


def survey(machine: Machine) -> Availability:
    """Return everything that stands in the way of ``machine``, or the device when nothing does."""
    facts = _facts(machine)
    reasons = [*_stack(machine), *_hardware(machine)]
    if reasons:
        return Availability(tuple(reasons), runtime=facts)
    name, capability = machine.device_name(), machine.capability()
    found = architecture.detect(capability)
    if found is None:
        major, minor = capability
        what = "is older than sm_90" if capability < architecture.OLDEST else "is of a generation without kernels here"
        reason = Reason(
            f"the device {name!r} has compute capability {major}.{minor}, which {what}",
            "use a Hopper (9.0) or data-centre Blackwell (10.0, 10.3) GPU; choose one with CUDA_VISIBLE_DEVICES",
        )
        return Availability((reason,), device_name=name, runtime=facts)
    return Availability(device_name=f"{name} ({found.family})", runtime=facts)


def survey_interpreted(machine: Machine) -> Availability:
    """Return what stands in the way of the interpreted mode, which needs no device."""
    problem = interpreting.problem()
    reasons = [*_triton(machine)]
    if problem is not None and not reasons:
        reasons = [problem]
    return Availability(tuple(reasons), device_name=INTERPRETED_DEVICE, runtime=_facts(machine))


def _facts(machine: Machine) -> str:
    facts = [f"torch {machine.torch_version()}"]
    cuda, triton = machine.cuda_version(), machine.triton_version()
    facts += [f"CUDA {cuda}"] if cuda else []
    facts += [f"triton {triton}"] if triton else []
    facts += [found.described() for found in optional.installed_libraries()]
    return ", ".join(facts)


def _triton(machine: Machine) -> Iterator[Reason]:
    installed = machine.triton_version()
    bounds = f"{_dotted(OLDEST_TRITON)} to {_dotted(NEWEST_TRITON)}"
    remedy = f"pip install 'deepinfer-multibackend[nvidia]': kernels were compiled with triton {bounds}"
    if installed is None:
        yield Reason("triton is not installed", remedy)
    elif not OLDEST_TRITON <= _series(installed) <= NEWEST_TRITON:
        yield Reason(f"triton {installed} is no release that the kernels were proved on", remedy)


def _stack(machine: Machine) -> Iterator[Reason]:
    yield from _triton(machine)
    if machine.cuda_version() is None:
        yield Reason(
            f"torch {machine.torch_version()} is built without CUDA",
            "install a CUDA build of torch in an environment of its own",
        )


def _hardware(machine: Machine) -> Iterator[Reason]:
    if not machine.has_driver():
        yield Reason(
            f"the GPU's kernel driver is not here: {DRIVER_LIBRARY} cannot be loaded",
            "install the NVIDIA driver; in a container run with --gpus all",
        )
    elif machine.cuda_version() is not None and machine.device_count() == 0:
        yield Reason("no CUDA device is visible", "look at `nvidia-smi` and CUDA_VISIBLE_DEVICES")


def _series(text: str) -> tuple[int, ...]:
    parts = text.partition("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def _dotted(series: tuple[int, int]) -> str:
    return f"{series[0]}.{series[1]}"


def with_reasons(found: Availability, more: tuple[Reason, ...]) -> Availability:
    """Return ``found`` with more that stands in the way."""
    return Availability((*found.reasons, *more), found.device_name, found.runtime)
