"""Host kernels: torch on the CPU, over views of device memory, as this project reads the operators' documentation."""

from __future__ import annotations

from collections.abc import Mapping

from host_cann.kernels import creation, elementwise, experts, layers, microscaling, movement, products, reductions
from host_cann.kernels.registry import Kernel, merge


def all_kernels() -> Mapping[str, Kernel]:
    """Return every kernel by the name of its operator."""
    modules = (creation, elementwise, experts, layers, microscaling, movement, products, reductions)
    return merge(module.TABLE for module in modules)
