"""Import the real torch_npu on a machine without CANN: empty libraries in place of the runtime, meta tensors only.

torch_npu's shared objects need six CANN libraries to load. Functions that return 0 stand in for every symbol they
miss, so that the operators' schemas and Meta kernels can be called. Nothing can run on a device afterwards:
``torch.npu.is_available()`` is False. Only the call check uses this, in a process of its own; the driver never does.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from deepinfer.errors import DriverUnavailableError

RUNTIME_LIBRARY: Final = "libascendcl.so"
EMPTY_LIBRARIES: Final = (
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libhccl.so",
)
_PREFIXES: Final = ("acl", "rt", "Msprof", "Hccl", "hccl")
_TOOLS: Final = ("gcc", "nm")


def load(folder: Path) -> None:
    """Build the stand-ins in ``folder`` and load them, so that ``import torch_npu`` works in this process.

    Raises DriverUnavailableError with everything that is missing.
    """
    if "torch_npu" in sys.modules:
        return
    package = torch_npu_folder()
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if package is None or missing:
        problems = [f"{tool} is not on the PATH; install gcc and binutils" for tool in missing]
        if package is None:
            problems.append("torch-npu is not installed; pip install torch-npu in an environment with the CPU torch")
        raise DriverUnavailableError(f"the call check cannot start: {'; '.join(problems)}")
    folder.mkdir(parents=True, exist_ok=True)
    symbols = _missing_symbols(package)
    source = "".join(f"int {symbol}(void) {{ return 0; }}\n" for symbol in symbols)
    for name, text in ((RUNTIME_LIBRARY, source), *((name, "") for name in EMPTY_LIBRARIES)):
        _compile(folder, name, text)
        # torch_npu's own link entries are then met by what this process has loaded under the same name.
        ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def torch_npu_folder() -> Path | None:
    """Return where torch_npu is installed, without importing it, or None."""
    spec = find_spec("torch_npu")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _missing_symbols(package: Path) -> list[str]:
    objects = sorted([*package.glob("lib/*.so"), *package.glob("_C*.so")])
    defined = _symbols(objects, "--defined-only")
    undefined = _symbols(objects, "--undefined-only")
    return sorted(name for name in undefined - defined if name.startswith(_PREFIXES))


def _symbols(objects: list[Path], which: str) -> set[str]:
    command = ["nm", "-D", "--format=posix", which, *map(str, objects)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603 (fixed tool)
    return {line.split()[0].partition("@")[0] for line in listed.splitlines() if line and not line.endswith(":")}


def _compile(folder: Path, name: str, source: str) -> None:
    command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-x", "c", "-", "-o", str(folder / name)]
    subprocess.run(command, input=source, text=True, check=True, capture_output=True)  # noqa: S603 (fixed tool)
