"""Optional libraries of kernels: FlashMLA, DeepGEMM and DeepEP, found without being imported.

A library that is installed is reported. It serves ops only when ``DEEPINFER_NVIDIA_PROVIDERS`` names it, and shows
itself in the plan then; one that is named and cannot serve is a reason why the driver is not available. Nothing needs
any of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Final

from deepinfer.accelerator.interface import Reason
from deepinfer.errors import DriverUnavailableError
from deepinfer.settings import Settings
from deepinfer_nvidia.architecture import Architecture

VARIABLE: Final = "DEEPINFER_NVIDIA_PROVIDERS"


@dataclass(frozen=True, slots=True)
class Library:
    """One library.

    Attributes:
        name: what the variable and the plan call it.
        module: its import package.
        distribution: its name on the index.
        ops: what it can serve here, by contract identifier.
        use: what becomes of it where it serves no op.
        symbols: functions and classes that the call sites use.
    """

    name: str
    module: str
    distribution: str
    ops: tuple[str, ...]
    use: str
    symbols: tuple[str, ...]


FLASH_MLA: Final = Library(
    "flash_mla",
    "flash_mla",
    "deepinfer-flashmla",
    ("attention.sparse",),
    "",
    ("flash_mla_with_kvcache", "get_mla_metadata"),
)
DEEP_GEMM: Final = Library(
    "deep_gemm",
    "deep_gemm",
    "deepinfer-gemm",
    ("linear.dense",),
    "",
    ("fp8_fp4_gemm_nt", "use_deterministic_algorithms"),
)
DEEP_EP: Final = Library(
    "deep_ep",
    "deep_ep",
    "deepinfer-ep",
    (),
    "the contract has no op yet that exchanges expert rows",
    ("EPBuffer",),
)
LIBRARIES: Final = MappingProxyType({each.name: each for each in (FLASH_MLA, DEEP_GEMM, DEEP_EP)})


@dataclass(frozen=True, slots=True)
class Found:
    """An installed library."""

    library: Library
    version: str

    @property
    def provider(self) -> str:
        """Name and version, as the plan shows them."""
        return f"{self.library.name} {self.version}"

    def described(self) -> str:
        """Return what a survey says of it."""
        served = ", ".join(self.library.ops) or self.library.use
        return f"{self.provider} installed ({served}; used where {VARIABLE} names it)"


def _version_of(library: Library) -> str:
    for name in (library.distribution, library.module):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "of unknown version"


def _exists(module: str) -> bool:
    return find_spec(module) is not None


def installed_libraries(exists: Callable[[str], bool] = _exists) -> tuple[Found, ...]:
    """Return the libraries whose module can be found; none of them is imported."""
    return tuple(Found(each, _version_of(each)) for each in LIBRARIES.values() if exists(each.module))


def wanted() -> tuple[str, ...]:
    """Return the libraries that the environment names."""
    return Settings.from_environment().nvidia_providers


def problems(
    names: Iterable[str], chip: Architecture | None, exists: Callable[[str], bool] = _exists
) -> tuple[Reason, ...]:
    """Return why libraries that were named cannot serve on ``chip``, everything at once."""
    found = []
    known = ", ".join(LIBRARIES)
    for name in names:
        library = LIBRARIES.get(name)
        if library is None:
            found.append(Reason(f"{VARIABLE} names {name!r}, which is no library of this driver", f"known: {known}"))
        elif not exists(library.module):
            found.append(
                Reason(
                    f"{VARIABLE} names {name!r}, which is not installed",
                    f"install {library.distribution}, or unset {VARIABLE}: no op needs it",
                )
            )
        elif not library.ops:
            found.append(
                Reason(f"{VARIABLE} names {name!r}, which serves no op: {library.use}", f"remove it from {VARIABLE}")
            )
        elif chip is not None and chip.family != "SM100":
            found.append(
                Reason(
                    f"{VARIABLE} names {name!r}, whose kernels for this model need SM100; this is {chip.family}",
                    f"remove it from {VARIABLE}",
                )
            )
    return tuple(found)


def load(library: Library) -> ModuleType:
    """Import a library and check that it has what is called; DriverUnavailableError otherwise."""
    try:
        module = importlib.import_module(library.module)
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise DriverUnavailableError(
            f"{library.name} was named by {VARIABLE} and does not load: {type(error).__name__}: {error}. Repair it, or "
            f"unset the variable: no op needs it"
        ) from error
    require_symbols(module, library)
    return module


def require_symbols(module: object, library: Library) -> None:
    """Raise DriverUnavailableError with every symbol that a call site uses and ``module`` lacks."""
    lacking: Sequence[str] = [name for name in library.symbols if not hasattr(module, name)]
    if lacking:
        raise DriverUnavailableError(
            f"{library.name} {_version_of(library)} has no {', '.join(lacking)}; install the release that "
            f"backends/nvidia/README.md names, or unset {VARIABLE}"
        )
