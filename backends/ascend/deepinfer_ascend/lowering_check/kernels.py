"""The kernels that are checked: every configuration that their package lists, as Triton's intermediate code."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from deepinfer.errors import DriverUnavailableError
from deepinfer_ascend.providers import TRITON_PACKAGE

TRITON_VERSION: Final = triton.__version__
# Any target that needs no device: the intermediate code is made before anything that belongs to a vendor.
_TARGET: Final = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration of a kernel.

    Attributes:
        ops: the ops of the contract that its module serves.
        configuration: what the kernels' package says about it.
    """

    ops: tuple[str, ...]
    configuration: Any

    @property
    def kernel(self) -> str:
        """Name of the kernel."""
        return str(self.configuration.name)

    @property
    def label(self) -> str:
        """What distinguishes it from the kernel's other configurations."""
        return str(self.configuration.label)


def candidates() -> tuple[Candidate, ...]:
    """Return every configuration of every kernel once."""
    try:
        registry = importlib.import_module(f"{TRITON_PACKAGE}.registry")
    except ModuleNotFoundError as error:
        raise DriverUnavailableError(
            f"the kernels' package {TRITON_PACKAGE} is not importable ({error}); in a checkout, put "
            f"backends/triton_shared on PYTHONPATH"
        ) from error
    found: dict[tuple[str, str], Candidate] = {}
    for names, listed in registry.MODULES.items():
        ops = tuple(name.strip() for name in str(names).split(","))
        for sizes in registry.MODELS:
            for configuration in listed(sizes):
                candidate = Candidate(ops, configuration)
                found.setdefault((candidate.kernel, candidate.label), candidate)
    return tuple(found.values())


def ttir_of(candidate: Candidate) -> str:
    """Return Triton's intermediate code of a configuration; whatever its compiler raises passes through."""
    configuration = candidate.configuration
    source = ASTSource(
        fn=configuration.kernel,
        signature=configuration.full_signature(),
        constexprs=dict(configuration.constants),
        attrs=configuration.attributes(),
    )
    backend = make_backend(_TARGET)
    settings = backend.parse_options(dict(configuration.options))
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    stages: dict[str, Any] = {}
    backend.add_stages(stages, settings, source.language)
    functions, modules = backend.get_codegen_implementation(settings), backend.get_module_map()
    module = source.make_ir(_TARGET, settings, functions, modules, context)
    return str(stages["ttir"](module, {}))


def matching(found: Sequence[Candidate], patterns: Sequence[str]) -> Iterator[Candidate]:
    """Yield the candidates whose kernel or ops contain one of the patterns; all, without patterns."""
    for candidate in found:
        if not patterns or any(text in name for text in patterns for name in (candidate.kernel, *candidate.ops)):
            yield candidate


def some_of_each(found: Sequence[Candidate], most: int) -> list[Candidate]:
    """Return at most so many configurations of each kernel, evenly spread over its list: the first is among them."""
    by_kernel: dict[str, list[Candidate]] = {}
    for candidate in found:
        by_kernel.setdefault(candidate.kernel, []).append(candidate)
    chosen = []
    for listed in by_kernel.values():
        count = min(most, len(listed))
        chosen += [listed[number * len(listed) // count] for number in range(count)]
    return chosen
