"""Which Triton releases the repairs were proved on."""

from __future__ import annotations

import triton

from deepinfer_conformance.triton_cpu.errors import TritonVersionError

PROVED_VERSIONS = ("3.9.0",)


def require_proved_version(version: str = "") -> None:
    """Raises `TritonVersionError` unless the repairs were proved on this version (default: the installed one).

    The repairs replace private methods of the interpreter. On another release they might replace nothing, and every
    number would be silently wrong again.
    """
    found = version or str(triton.__version__)
    if found not in PROVED_VERSIONS:
        raise TritonVersionError(
            f"the interpreter's repairs are proved on triton {', '.join(PROVED_VERSIONS)}; installed is {found!r}. "
            f"Install triton=={PROVED_VERSIONS[-1]} for interpreter tests (an environment of their own will do), or "
            "run conformance/tests/triton_kit on the other version and add it to PROVED_VERSIONS"
        )
