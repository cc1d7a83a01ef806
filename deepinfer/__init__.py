"""DeepInfer: a backend-neutral inference engine for DeepSeek-V4.1-Flash.

An independent implementation; it is not the distribution named ``deepinfer`` on the package index.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from deepinfer.settings import keep_torch_from_loading_backends

if TYPE_CHECKING:
    from deepinfer.engine.outputs import CompletionOutput, RequestOutput
    from deepinfer.llm import LLM
    from deepinfer.sampling.grammar.specification import StructuredOutputs
    from deepinfer.sampling.params import SamplingParams

__version__ = "0.1.0"

if "torch" not in sys.modules:
    keep_torch_from_loading_backends()

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
