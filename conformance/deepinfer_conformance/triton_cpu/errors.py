"""What the kit refuses and what it finds."""

from __future__ import annotations

from deepinfer.errors import DeepInferError, ProblemsError


class TritonVersionError(DeepInferError):
    """The installed Triton is not one on which the repairs were proved."""


class InterpretationError(DeepInferError):
    """A kernel does something that the interpreter would answer differently from compiled code."""


class OutOfBoundsError(DeepInferError):
    """A lane that was not masked off reached outside the storage of the argument it was derived from.

    Attributes:
        kernel: name of the kernel.
        program_id: the program that did it.
        access: ``"load"``, ``"store"`` or the name of the atomic.
        operand: parameter whose pointer was used, or ``""`` if the pointer was not derived from one.
        offset_bytes: first byte reached, counted from the parameter's own pointer (from address 0 without operand).
        extent_bytes: bytes that may be reached from there: ``[first, last)``.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str,
        program_id: tuple[int, int, int],
        access: str,
        operand: str,
        offset_bytes: int,
        extent_bytes: tuple[int, int],
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.program_id = program_id
        self.access = access
        self.operand = operand
        self.offset_bytes = offset_bytes
        self.extent_bytes = extent_bytes


class LaunchError(ProblemsError):
    """A launch that the compiled path would refuse, or that the interpreter cannot run."""


class CompilationError(DeepInferError):
    """A kernel could not be compiled ahead of time, or the compiler died."""


class KernelLimitError(ProblemsError):
    """Compiled kernels break limits; every broken limit of every kernel is listed."""
