"""Kernels on CPU tensors: the repaired interpreter in place of the launcher, for the length of a ``with`` block."""

from __future__ import annotations

import atexit
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from deepinfer_conformance.triton_cpu import reductions
from deepinfer_conformance.triton_cpu.arguments import Bound, bind_launch
from deepinfer_conformance.triton_cpu.errors import InterpretationError
from deepinfer_conformance.triton_cpu.launches import Launch
from deepinfer_conformance.triton_cpu.memory import CheckedBuilder
from deepinfer_conformance.triton_cpu.rewriting import rewrite
from deepinfer_conformance.triton_cpu.versions import require_proved_version

Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]


class Session:
    """The launches of one `interpreted` block.

    Attributes:
        launches: every launch, in order, also one whose kernel then failed.
    """

    def __init__(
        self,
        *,
        bounds: Literal["storage", "view"],
        poison_undefined: bool,
        program_order: Literal["forward", "reverse"],
        keep_launches: bool,
    ) -> None:
        self._keep_launches = keep_launches
        self.launches: list[Launch] = []
        self._view_only = bounds == "view"
        self._reverse = program_order == "reverse"
        self.builder = CheckedBuilder(poison_undefined=poison_undefined)
        self.semantic = TritonSemantic(self.builder)
        self._rewritten: dict[Callable[..., Any], Callable[..., Any]] = {}

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run a device function from inside a kernel."""
        if function not in self._rewritten:
            self._rewritten[function] = rewrite(function, self.semantic)
        return self._rewritten[function](*arguments, **named)

    def run(self, kernel: Any, arguments: tuple[Any, ...], grid: Grid, named: Mapping[str, Any]) -> None:
        """Run every program of a launch, one after another."""
        for hook in kernel.pre_run_hooks:
            hook(*arguments, **named)
        bound = bind_launch(kernel.fn, arguments, grid, named, view_only=self._view_only)
        if self._keep_launches:
            self.launches.append(bound.launch)
        self.builder.set_grid_dim(*bound.launch.grid)
        self.builder.begin(bound.launch.kernel, bound.operands)
        values = bound.device_values()
        indices = list(np.ndindex(*bound.launch.grid))
        for program in reversed(indices) if self._reverse else indices:
            self.builder.set_grid_idx(*program)
            self._run_program(kernel.fn, values, bound, program)

    def _run_program(
        self, function: Callable[..., Any], values: Mapping[str, Any], bound: Bound, program: tuple[int, ...]
    ) -> None:
        try:
            # NaN and overflow are results here; numpy's warnings about them are not the kernel's.
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                self.call(function, (), values)
        except Exception as error:
            error.add_note(f"in kernel {bound.launch.kernel!r}, program {program} of grid {bound.launch.grid}")
            raise


@contextmanager
def interpreted(
    *,
    bounds: Literal["storage", "view"] = "storage",
    poison_undefined: bool = True,
    program_order: Literal["forward", "reverse"] = "forward",
    keep_launches: bool = True,
) -> Iterator[Session]:
    """Within the block every launch ``kernel[grid](...)`` runs on CPU tensors in the repaired interpreter.

    It does not matter whether the process set ``TRITON_INTERPRET``: kernels and their helpers run from their Python
    source. Nothing of Triton stays changed behind the block. One block at a time, in one thread.

    Args:
        bounds: what a kernel may reach from a tensor: its whole ``"storage"``, or only the ``"view"`` that was passed.
        poison_undefined: masked-off lanes of a load without ``other`` hold NaN, or large integers; the language
            leaves them undefined. ``False``: zeros, as the interpreter and NVIDIA's compiled code happen to give.
        program_order: ``"reverse"`` runs the last program first. Programs of one launch may run in any order, so a
            kernel must give the same bits both ways.
        keep_launches: ``False``: nothing is remembered, for blocks without an end.

    Raises:
        TritonVersionError: the repairs were not proved on the installed Triton.
        OutOfBoundsError: from the launch, at the first access out of bounds.
    """
    require_proved_version()
    if isinstance(interpreter.interpreter_builder, CheckedBuilder):
        raise InterpretationError("`interpreted` blocks do not nest; leave the outer one first")
    session = Session(
        bounds=bounds,
        poison_undefined=poison_undefined,
        program_order=program_order,
        keep_launches=keep_launches,
    )
    scope = interpreter._LangPatchScope()
    try:
        _install(scope, session)
        yield session
    finally:
        scope.restore()


def interpret_from_here() -> None:
    """Interpret every launch of this process from here on; no work where an `interpreted` block is open.

    For a process that lives in the interpreter, such as a driver's own interpreted mode; tests use `interpreted`.
    """
    if isinstance(interpreter.interpreter_builder, CheckedBuilder):
        return
    forever = ExitStack()
    forever.enter_context(interpreted(keep_launches=False))
    # Also what keeps the block alive until then.
    atexit.register(forever.close)


def _install(scope: Any, session: Session) -> None:
    scope.set_attr(interpreter, "interpreter_builder", session.builder)
    scope.set_attr(interpreter, "interpreter_semantic", session.semantic)
    scope.set_attr(interpreter, "ReduceOps", reductions.ReduceOps)
    scope.set_attr(interpreter, "ScanOps", reductions.ScanOps)

    def run(kernel: Any, *arguments: Any, grid: Grid, warmup: bool, **named: Any) -> None:
        if not warmup:
            session.run(kernel, arguments, grid, named)

    def call(kernel: Any, *arguments: Any, **named: Any) -> Any:
        return session.call(kernel.fn, arguments, named)

    for kind in (JITFunction, interpreter.InterpretedFunction):
        scope.set_attr(kind, "run", run)
        scope.set_attr(kind, "__call__", call)
    # Both modules that a kernel may name; Triton's own patch looks for them in the kernel's globals.
    language = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    scope._changes.extend(language._changes)
    # x.sum() finds the jitted function on the class, which Python does not bind.
    for name, member in list(vars(tl.tensor).items()):
        if isinstance(member, JITFunction):
            scope.set_attr(tl.tensor, name, _bound(member))
    # Programmatic dependent launch only moves work in time; programs run one after another here.
    for name in ("gdc_wait", "gdc_launch_dependents"):
        scope.set_attr(tl.extra.cuda, name, _nothing)


def _bound(member: Any) -> Callable[..., Any]:
    def method(tensor: Any, *arguments: Any, **named: Any) -> Any:
        return member(tensor, *arguments, **named)

    return method


def _nothing(*_arguments: Any, **_named: Any) -> None:
    return None


def launch(kernel: Any, grid: Grid, *arguments: Any, **named: Any) -> Launch:
    """Launch one kernel on CPU tensors in a block of its own; returns what was launched.

    ``named`` holds the kernel's own parameters and Triton's options (``num_warps`` and so on), as in
    ``kernel[grid](...)``. For the options of the block itself use `interpreted`.
    """
    with interpreted() as session:
        kernel[grid](*arguments, **named)
    return session.launches[0]
