"""SamplingParams: what a user asks of one request, and every reason for which it can be refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType

from deepinfer.sampling import conversion
from deepinfer.sampling.checks import id_problems, integer_problems, length_problems, number_problems, string_problems
from deepinfer.sampling.grammar.specification import StructuredOutputs, structured_outputs
from deepinfer.sampling.limits import SamplingLimits

_CONVERTERS: Mapping[str, Callable[[object], object]] = MappingProxyType(
    {
        "n": conversion.integer,
        "temperature": conversion.number,
        "top_p": conversion.number,
        "top_k": conversion.integer,
        "min_p": conversion.number,
        "max_tokens": conversion.integer,
        "min_tokens": conversion.integer,
        "seed": conversion.optional(conversion.integer),
        "stop": conversion.strings,
        "stop_token_ids": conversion.integers,
        "include_stop_str_in_output": conversion.boolean,
        "ignore_eos": conversion.boolean,
        "logprobs": conversion.optional(conversion.integer),
        "raw_logprobs": conversion.boolean,
        "prompt_logprobs": conversion.optional(conversion.integer),
        "logit_bias": conversion.bias,
        "allowed_token_ids": conversion.optional_integers,
        "blacklist_token_ids": conversion.integers,
        "presence_penalty": conversion.number,
        "frequency_penalty": conversion.number,
        "repetition_penalty": conversion.number,
        "first_n_token_no_eos": conversion.integer,
        "golden_token_ids": conversion.optional_integers,
        "structured_outputs": structured_outputs,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, when a request ends, and what is reported; immutable and shareable.

    Wrong types raise one TypeError that lists them all. Values out of range do not raise here, because only an engine
    knows its vocabulary and limits: it refuses the request with what :meth:`problems` says.

    Sequences are stored as tuples, None given for a list means none, numbers of numpy are taken as Python's.

    Order in which the settings act: forced token, logit bias, penalties (repetition, then frequency and presence),
    blacklist, allowed ids, end-token bans, grammar, temperature, top-k, top-p, min-p; then log-probabilities and draw.

    Attributes:
        n: answers to make. Answer i has its own seed, :func:`deepinfer.sampling.streams.sibling_seed`.
        temperature: 0 is exact argmax with the lowest id among equals; it is never rounded to something small.
        top_p: keeps the shortest prefix of the tokens, best first, whose mass exceeds this share; 1 keeps all, 0 keeps
            the best.
        top_k: keeps the best k; 0 or less, or the vocabulary and more, keep all.
        min_p: keeps tokens at least this fraction as probable as the best one.
        max_tokens: most tokens to emit, at least 1.
        min_tokens: no stop token and no end token is emitted before that many tokens are out (the end token may be, if
            ``ignore_eos``), and no stop string ends the request.
        seed: key of the random draws; None gives each request a random one of its own.
        stop: strings that end the request when they appear in its text.
        stop_token_ids: tokens that end the request.
        include_stop_str_in_output: whether the text keeps the stop string.
        ignore_eos: the model's end token does not end the request.
        logprobs: list this many best tokens per emitted token, and the emitted one; None lists nothing. Values are
            those of the processed distribution, after everything above, renormalised; so at temperature 0 the chosen
            token has 0.0 and no other is listed. A forced token without any mass has -9999.0.
        raw_logprobs: list the model's own log-probabilities instead (log-softmax before everything above).
        prompt_logprobs: list this many best tokens per prompt position, and the prompt's own; always raw.
        logit_bias: added to the logits of these ids.
        allowed_token_ids: only these may be emitted.
        blacklist_token_ids: these are never emitted.
        presence_penalty: subtracted from tokens that were emitted before.
        frequency_penalty: subtracted once per time that a token was emitted before.
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt holds or that
            were emitted before.
        first_n_token_no_eos: the end token is not among the first n emitted tokens, for any n, also with
            ``ignore_eos``; a preemption does not start this count again.
        golden_token_ids: token to emit at each output position instead of the drawn one, or -1; log-probabilities
            remain those of the distribution that would have been drawn from.
        structured_outputs: the form that the answer must have.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    raw_logprobs: bool = False
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    blacklist_token_ids: Sequence[int] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    first_n_token_no_eos: int = 0
    golden_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        """Bring every value to its stored form, or raise one TypeError about all that have none."""
        wrong: list[str] = []
        for each in fields(self):
            try:
                value = _CONVERTERS[each.name](getattr(self, each.name))
            except TypeError as error:
                wrong.append(f"{each.name}: {error}")
            else:
                object.__setattr__(self, each.name, value)
        if wrong:
            lines = "".join(f"\n  - {problem}" for problem in wrong)
            raise TypeError(
                f"SamplingParams: {len(wrong)} value{'' if len(wrong) == 1 else 's'} of a wrong type{lines}"
            )

    def problems(self, vocab_size: int, limits: SamplingLimits | None = None) -> tuple[str, ...]:
        """Return every reason to refuse a request with these parameters, in words; empty if there is none.

        Args:
            vocab_size: ids run from 0 to this minus 1.
            limits: what the engine accepts; None means the documented defaults.
        """
        limits = limits if limits is not None else SamplingLimits()
        return (
            *self._count_problems(limits),
            *self._filter_problems(),
            *self._penalty_problems(limits),
            *self._stop_problems(vocab_size, limits),
            *self._id_problems(vocab_size, limits),
            *self._form_problems(vocab_size, limits),
        )

    def _count_problems(self, limits: SamplingLimits) -> list[str]:
        problems = integer_problems("n", self.n, 1, limits.choices)
        too_many = integer_problems("max_tokens", self.max_tokens, 1, limits.max_tokens)
        problems += too_many
        problems += integer_problems("min_tokens", self.min_tokens, 0, limits.max_tokens)
        if not too_many and self.max_tokens < self.min_tokens <= limits.max_tokens:
            problems.append(f"min_tokens is {self.min_tokens}, above max_tokens, which is {self.max_tokens}")
        problems += integer_problems("first_n_token_no_eos", self.first_n_token_no_eos, 0, limits.max_tokens)
        if self.logprobs is not None:
            problems += integer_problems("logprobs", self.logprobs, 0, limits.logprobs)
        if self.prompt_logprobs is not None:
            problems += integer_problems("prompt_logprobs", self.prompt_logprobs, 0, limits.logprobs)
        if self.seed is not None:
            problems += integer_problems("seed", self.seed, -(2**63), 2**63 - 1)
        return problems

    def _filter_problems(self) -> list[str]:
        return [
            *number_problems("temperature", self.temperature, 0.0),
            *number_problems("top_p", self.top_p, 0.0, 1.0),
            *number_problems("min_p", self.min_p, 0.0, 1.0),
        ]

    def _penalty_problems(self, limits: SamplingLimits) -> list[str]:
        additive, largest = limits.additive_penalty, limits.repetition_penalty
        return [
            *number_problems("presence_penalty", self.presence_penalty, -additive, additive),
            *number_problems("frequency_penalty", self.frequency_penalty, -additive, additive),
            *number_problems("repetition_penalty", self.repetition_penalty, 1.0 / largest, largest),
        ]

    def _stop_problems(self, vocab_size: int, limits: SamplingLimits) -> list[str]:
        return [
            *length_problems("stop", len(self.stop), limits.stop_strings),
            *string_problems("stop", self.stop, limits.stop_characters),
            *length_problems("stop_token_ids", len(self.stop_token_ids), limits.stop_token_ids),
            *id_problems("stop_token_ids", self.stop_token_ids, vocab_size),
        ]

    def _id_problems(self, vocab_size: int, limits: SamplingLimits) -> list[str]:
        problems = []
        bias = self.logit_bias or {}
        wrong_bias = [token_id for token_id, value in bias.items() if not abs(value) <= limits.bias]
        if wrong_bias:
            first = number_problems(f"logit_bias[{wrong_bias[0]}]", bias[wrong_bias[0]], -limits.bias, limits.bias)
            problems += [f"{problem} ({len(wrong_bias)} such in all)" for problem in first]
        for name, ids in (
            ("logit_bias", tuple(bias)),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("blacklist_token_ids", self.blacklist_token_ids),
        ):
            problems += length_problems(name, len(ids), limits.token_ids)
            problems += id_problems(name, ids, vocab_size)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            problems.append("allowed_token_ids is empty, so nothing could be emitted; give ids, or None for all")
        golden = self.golden_token_ids or ()
        problems += length_problems("golden_token_ids", len(golden), limits.golden_token_ids)
        problems += id_problems("golden_token_ids", golden, vocab_size, unset=-1)
        return problems

    def _form_problems(self, vocab_size: int, limits: SamplingLimits) -> list[str]:
        if self.structured_outputs is None:
            return []
        problems = self.structured_outputs.problems(vocab_size, limits)
        if self.golden_token_ids:
            problems.append("golden_token_ids and structured_outputs contradict each other; give one of them")
        return problems
