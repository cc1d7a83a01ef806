"""Whether the driver can run here: every layer of the stack is looked at, every absence is a reason with a remedy.

The layers, from the top: the torch-npu package, its fit to torch, the CANN libraries, the kernel driver, a device, a
chip that the driver knows. torch_npu is imported only when the package and the libraries are there.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import torch

from deepinfer.accelerator.interface import Availability, Reason
from deepinfer.errors import DriverUnavailableError
from deepinfer_ascend import environment, runtime, soc

LIBRARIES: Final = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
)
"""What torch_npu 2.13 is linked to outside torch and the C library."""

DRIVER_NODE: Final = Path("/dev/davinci_manager")
DEVICE_NODES: Final = "davinci[0-9]*"


class Machine(Protocol):
    """What availability asks of the machine; tests answer instead of it."""

    def torch_npu_version(self) -> str | None:
        """Return the installed version of torch-npu, or None."""

    def torch_version(self) -> str:
        """Return the version of torch."""

    def torch_has_cuda(self) -> bool:
        """Return True when torch was built for CUDA."""

    def can_load(self, library: str) -> bool:
        """Return True when the dynamic loader finds the library."""

    def has_driver(self) -> bool:
        """Return True when the NPU's kernel driver is there."""

    def device_nodes(self) -> int:
        """Return how many NPUs the kernel driver shows."""

    def soc_name(self) -> str:
        """Import torch_npu and return the name of device 0, empty without one; DriverUnavailableError if it fails."""

    def cann_version(self) -> str:
        """Return CANN's version as the runtime says it, empty if it does not."""


class ThisMachine:
    """The machine that the process runs on."""

    def torch_npu_version(self) -> str | None:
        """See :class:`Machine`."""
        return runtime.installed_version()

    def torch_version(self) -> str:
        """See :class:`Machine`."""
        return str(torch.__version__)

    def torch_has_cuda(self) -> bool:
        """See :class:`Machine`."""
        return torch.version.cuda is not None

    def can_load(self, library: str) -> bool:
        """See :class:`Machine`."""
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            return False
        return True

    def has_driver(self) -> bool:
        """See :class:`Machine`."""
        return DRIVER_NODE.exists()

    def device_nodes(self) -> int:
        """See :class:`Machine`."""
        return len(list(DRIVER_NODE.parent.glob(DEVICE_NODES)))

    def soc_name(self) -> str:
        """See :class:`Machine`."""
        runtime.load()
        npu = runtime.npu()
        return str(npu.get_device_name(0)) if npu.is_available() and npu.device_count() else ""

    def cann_version(self) -> str:
        """See :class:`Machine`."""
        utilities = runtime.npu().utils
        return str(utilities.get_cann_version()) if hasattr(utilities, "get_cann_version") else ""


def survey(machine: Machine) -> Availability:
    """Return everything that stands in the way on ``machine``, or the device when nothing does."""
    facts = [f"torch {machine.torch_version()}"]
    reasons = list(_stack(machine))
    installed = machine.torch_npu_version()
    if installed is not None:
        facts.append(f"torch-npu {installed}")
    if reasons:
        reasons += _hardware(machine)
        return Availability(tuple(reasons), runtime=", ".join(facts))
    try:
        name = machine.soc_name()
    except DriverUnavailableError as error:
        reason = Reason(str(error), "repair CANN; `python -c 'import torch_npu'` shows the whole error")
        return Availability((reason, *_hardware(machine)), runtime=", ".join(facts))
    cann = machine.cann_version()
    facts += [f"CANN {cann}"] if cann else []
    facts.append(environment.described())
    if not name:
        missing = list(_hardware(machine)) or [
            Reason("the runtime shows no NPU", "look at `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES")
        ]
        return Availability(tuple(missing), runtime=", ".join(facts))
    if soc.detect(name) is None:
        known = ", ".join(soc.supported_families())
        reason = Reason(f"the device is {name!r}, which this driver does not know", f"use one of: {known}")
        return Availability((reason,), device_name=name, runtime=", ".join(facts))
    return Availability(device_name=name, runtime=", ".join(facts))


def _stack(machine: Machine) -> Iterator[Reason]:
    installed, torch_version = machine.torch_npu_version(), machine.torch_version()
    if installed is None:
        yield Reason(
            "torch-npu is not installed",
            f"pip install 'deepinfer-multibackend[ascend]' in an environment with the CPU build of torch; its version "
            f"must begin like torch's {torch_version}",
        )
    elif _series(installed) != _series(torch_version):
        yield Reason(
            f"torch-npu {installed} does not fit torch {torch_version}",
            f"pip install 'torch-npu=={_series(torch_version)}.*', or the torch that it was built for",
        )
    if machine.torch_has_cuda():
        yield Reason(
            f"torch {torch_version} was built for CUDA, and torch-npu refuses a second accelerator",
            "install the CPU build of torch in an environment of its own",
        )
    missing = [library for library in LIBRARIES if not machine.can_load(library)]
    if missing:
        yield Reason(
            f"CANN libraries are not found: {', '.join(missing)}",
            "install the CANN toolkit (9.0 or later for Ascend 950) and source its set_env.sh in this shell",
        )


def _hardware(machine: Machine) -> Iterator[Reason]:
    if not machine.has_driver():
        yield Reason(
            f"the NPU's kernel driver is not loaded: {DRIVER_NODE} does not exist",
            "install the Ascend HDK driver and firmware; in a container pass the device nodes through",
        )
    if machine.device_nodes() == 0:
        yield Reason(
            f"no NPU is attached: {DRIVER_NODE.parent}/{DEVICE_NODES} matches nothing",
            "check `npu-smi info`; in a container pass --device /dev/davinci0",
        )


def _series(version: str) -> str:
    return ".".join(version.partition("+")[0].split(".")[:2])
