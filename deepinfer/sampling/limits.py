"""The documented limits of sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingLimits:
    """The largest values that an engine accepts; whatever is above is refused with the limit named.

    They bound the memory that one request can ask for; the engine's context length bounds the rest.

    Attributes:
        choices: largest ``n``.
        max_tokens: largest ``max_tokens``, and so of ``min_tokens`` and ``first_n_token_no_eos``.
        logprobs: largest ``logprobs`` and ``prompt_logprobs`` (a count above the vocabulary lists every token).
        stop_strings: longest list of stop strings.
        stop_characters: longest single stop string.
        stop_token_ids: longest list of stop ids.
        token_ids: longest ``logit_bias``, ``allowed_token_ids`` and ``blacklist_token_ids``.
        golden_token_ids: longest forced continuation.
        bias: largest magnitude of a logit bias.
        additive_penalty: largest magnitude of the presence and the frequency penalty.
        repetition_penalty: largest repetition penalty; the smallest is ``1 / repetition_penalty``.
        grammar_characters: longest JSON schema, regular expression or EBNF grammar.
        trigger_token_ids: longest sequence of tokens that begins a form.
    """

    choices: int = 1024
    max_tokens: int = 2**31 - 1
    logprobs: int = 1024
    stop_strings: int = 64
    stop_characters: int = 1024
    stop_token_ids: int = 1024
    token_ids: int = 16384
    golden_token_ids: int = 2**20
    bias: float = 1e6
    additive_penalty: float = 2.0
    repetition_penalty: float = 100.0
    grammar_characters: int = 65536
    trigger_token_ids: int = 64
