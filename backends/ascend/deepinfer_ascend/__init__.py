"""The Ascend driver: torch-npu operators where their documented meaning is the contract's, others named by the plan.

Importing this package imports neither torch_npu nor CANN; :meth:`Driver.availability` is the first call that may.
"""

# First of all imports: `deepinfer` keeps torch from loading torch_npu by itself, which fails where CANN is missing.
import deepinfer.errors  # noqa: F401
from deepinfer_ascend.driver import Driver

__all__ = ["Driver"]
