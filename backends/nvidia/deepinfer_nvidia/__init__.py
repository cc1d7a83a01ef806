"""The NVIDIA driver: portable Triton kernels over torch's CUDA, SM100 (Blackwell) first, SM90 (Hopper) second.

Importing this package imports no Triton and makes no CUDA call; :meth:`Driver.availability` is the first that may.
"""

from __future__ import annotations

from deepinfer_nvidia.driver import Driver

__all__ = ["Driver"]
