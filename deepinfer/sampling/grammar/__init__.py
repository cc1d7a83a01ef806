"""Structured output: what a request may demand of the form of its answer, and how every step keeps to it.

Importing this package does not import xgrammar (extra ``structured``); compiling the first grammar does.
"""

from deepinfer.sampling.grammar.compiler import GrammarCompiler, GrammarLimits
from deepinfer.sampling.grammar.matching import CompiledForm, FormCompiler, Matcher
from deepinfer.sampling.grammar.progress import GrammarProgress
from deepinfer.sampling.grammar.specification import GrammarKind, StructuredOutputs

__all__ = [
    "CompiledForm",
    "FormCompiler",
    "GrammarCompiler",
    "GrammarKind",
    "GrammarLimits",
    "GrammarProgress",
    "Matcher",
    "StructuredOutputs",
]
