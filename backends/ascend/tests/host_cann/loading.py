"""Loads the libraries and torch_npu, once per process."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path

from host_cann.build import LIBRARIES, library_folder
from host_cann.dispatch import Dispatcher
from host_cann.errors import HostCannError
from host_cann.formats import CHIPS
from host_cann.kernels import all_kernels
from host_cann.kernels.registry import Function, Kernel
from host_cann.prototypes import parse
from host_cann.recording import Log, Recording

CANN_VERSION = "9.1.0"
"""What the emulator claims to be. torch_npu chooses variants of operators by the names that it finds: all of them."""


class Emulator:
    """The emulated machine behind torch.npu in this process."""

    def __init__(self, soc: str, devices: int, library: ctypes.CDLL) -> None:
        self.soc = soc
        self.devices = devices
        self.library = library
        self._dispatcher = Dispatcher(library, all_kernels())
        self._log = Log(library, self._dispatcher)
        self._readers = 0

    @property
    def operators(self) -> tuple[str, ...]:
        """The operators with a host kernel."""
        return self._dispatcher.operators

    def reason(self) -> str:
        """Return, and forget, why the last call of this thread was refused."""
        self.library.aclGetRecentErrMsg.restype = ctypes.c_char_p
        return bytes(self.library.aclGetRecentErrMsg()).decode()

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Record every request of the context; contexts may nest."""
        recording = Recording()
        if not self._readers:
            self._log.keep(keep=True)
        self._readers += 1
        start = self._log.position()
        try:
            yield recording
        finally:
            recording.fill(self._log.since(start))
            self._readers -= 1
            if not self._readers:
                self._log.keep(keep=False)

    def calls_only(self) -> AbstractContextManager[None]:
        """Record calls without computing: operators without a kernel pass, and results stay unwritten (poison)."""
        return self._dispatcher.calls_only()

    def kernel(self, line: str, function: Function) -> AbstractContextManager[None]:
        """Use ``function`` for an operator; it gets every parameter of the prototype by name and writes the results."""
        prototype = parse(line)
        return self._dispatcher.replaced(prototype.operator, Kernel(prototype, function))

    def without_kernel(self, operator: str) -> AbstractContextManager[None]:
        """Make ``operator`` one that has no kernel."""
        return self._dispatcher.replaced(operator, None)


def load(soc: str = "Ascend950PR_9599", devices: int = 1, *, hccl_deadline_s: float = 30.0) -> Emulator:
    """Return the emulated machine of this process, with torch_npu imported on top of it.

    Raises:
        HostCannError: torch_npu is absent or was imported before; or the process has another machine already.
    """
    if soc not in CHIPS:
        raise HostCannError(f"soc {soc!r} is not emulated; choose one of {', '.join(CHIPS)}")
    current = os.environ.get("HOST_CANN_MACHINE_OF_PROCESS")
    wanted = f"{os.getpid()} {soc} {devices}"
    if current is not None and current.split()[0] == str(os.getpid()) and current != wanted:
        raise HostCannError(
            f"this process has the machine {current!r} (process, soc, devices); start another for {soc!r}"
        )
    return _load(soc, devices, hccl_deadline_s, wanted)


@cache
def _load(soc: str, devices: int, hccl_deadline_s: float, wanted: str) -> Emulator:
    if "torch_npu" in sys.modules:
        raise HostCannError("torch_npu was imported before host_cann.load()")
    found = importlib.util.find_spec("torch_npu")
    if found is None or found.origin is None:
        raise HostCannError("torch_npu is not installed; pip install torch-npu==2.13.0 beside torch==2.13.0 (CPU)")
    chip = CHIPS[soc]
    os.environ |= {
        "HOST_CANN_MACHINE_OF_PROCESS": wanted,
        "HOST_CANN_SOC": chip.soc,
        "HOST_CANN_DEVICES": str(devices),
        "HOST_CANN_MEMORY_BYTES": str(chip.memory_bytes),
        "HOST_CANN_CUBE_CORES": str(chip.cube_cores),
        "HOST_CANN_VECTOR_CORES": str(chip.vector_cores),
        "HOST_CANN_VERSION": CANN_VERSION,
        "HOST_CANN_HCCL_DEADLINE_S": str(hccl_deadline_s),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    # Else a thread of torch_npu's own launches operators, and errors surface in a later call.
    os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
    folder = library_folder(Path(found.origin).parent.parent)
    # Loaded for everybody, so that torch_npu's links and its dlopen by name find them without LD_LIBRARY_PATH.
    library = ctypes.CDLL(str(folder / "libhost_cann.so"), mode=ctypes.RTLD_GLOBAL)
    for name in LIBRARIES:
        ctypes.CDLL(str(folder / f"{name}.so"), mode=ctypes.RTLD_GLOBAL)
    emulator = Emulator(soc, devices, library)
    importlib.import_module("torch_npu")
    return emulator
