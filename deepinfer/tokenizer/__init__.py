"""Text to token ids and back: the tokenizer, incremental detokenisation, stop strings, an answer's growing text."""

from deepinfer.tokenizer.detokenizer import IncrementalDetokenizer
from deepinfer.tokenizer.output_text import OutputText
from deepinfer.tokenizer.stop_strings import StopStringMatcher
from deepinfer.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "OutputText", "StopStringMatcher", "Tokenizer"]
