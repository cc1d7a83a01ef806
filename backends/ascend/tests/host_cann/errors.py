"""Errors of the emulator. What it refuses on behalf of the device surfaces as torch_npu's own RuntimeError."""

from __future__ import annotations


class HostCannError(Exception):
    """The host CANN cannot be built, loaded or asked for what was asked."""


class KernelError(Exception):
    """An operator was called in a way that its host kernel refuses."""
