"""DeepInfer: a backend-neutral inference engine for DeepSeek-V4.1-Flash.

An independent implementation; it is not the distribution named ``deepinfer`` on the package index.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepinfer.engine.outputs import CompletionOutput, RequestOutput
    from deepinfer.llm import LLM
    from deepinfer.sampling.grammar.specification import StructuredOutputs
    from deepinfer.sampling.params import SamplingParams

__version__ = "0.1.0"

# torch imports every installed backend when it is imported itself, and torch_npu fails there where CANN is missing:
# then `import torch` fails in every process. The Ascend driver imports torch_npu when it is asked for, so that nobody
# needs this. A value that the user has set stays; where torch was imported first, its own error names the variable.
if "torch" not in sys.modules:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "LLM": "deepinfer.llm",
    "SamplingParams": "deepinfer.sampling.params",
    "StructuredOutputs": "deepinfer.sampling.grammar.specification",
    "RequestOutput": "deepinfer.engine.outputs",
    "CompletionOutput": "deepinfer.engine.outputs",
}


def __getattr__(name: str) -> object:
    """Import the public names on first use, so that ``deepinfer --help`` need not wait for torch."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'deepinfer' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
