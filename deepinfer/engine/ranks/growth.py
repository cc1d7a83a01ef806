"""Records on their way from a rank's process: what is new since the request's last record, not all of it again.

A request of L tokens gives L records of up to L tokens each. Whole ones would cost a pipe L * L / 2 of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from deepinfer.engine.growing import Prefix, items_since
from deepinfer.engine.outputs import CompletionOutput, FinishReason, RequestOutput


@dataclass(frozen=True, slots=True)
class AnswerGrowth:
    """What is new of one answer.

    Attributes:
        index: number of the sibling.
        kept_text: characters of the text so far that stay; a stop string that is found may take some back.
        text: what follows them.
        token_ids: new ones.
        logprobs: of the new tokens; None unless asked for.
        finish_reason, stop_reason, message: as they are now.
    """

    index: int
    kept_text: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...] | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    message: str | None


@dataclass(frozen=True, slots=True)
class RecordGrowth:
    """What is new of one request.

    Attributes:
        request_id: the caller's id.
        head: the record without its answers; None where nothing of it is new.
        answers: one for each sibling.
        finished: no further record will come.
    """

    request_id: str
    head: RequestOutput | None
    answers: tuple[AnswerGrowth, ...]
    finished: bool


@dataclass(slots=True)
class _Sent:
    """How much of a request has gone out: texts, numbers of tokens, and whether its prompt's log-probabilities have."""

    texts: list[str]
    tokens: list[int]
    with_prompt: bool


class Sender:
    """The rank's side: remembers how much of each request has gone out."""

    def __init__(self) -> None:
        """Nothing has gone out yet."""
        self._sent: dict[str, _Sent] = {}

    def growths(self, records: Iterable[RequestOutput]) -> list[RecordGrowth]:
        """Return what is new of records, in their order."""
        return [self._growth(record) for record in records]

    def forget(self, request_ids: Iterable[str]) -> None:
        """Begin anew with these ids: their requests are gone, and no terminal record tells so."""
        for request_id in request_ids:
            self._sent.pop(request_id, None)

    def _growth(self, record: RequestOutput) -> RecordGrowth:
        count = len(record.outputs)
        sent = self._sent.get(record.request_id)
        has_prompt = record.prompt_logprobs is not None
        head = replace(record, outputs=()) if sent is None or has_prompt != sent.with_prompt else None
        if sent is None:
            sent = self._sent[record.request_id] = _Sent([""] * count, [0] * count, with_prompt=has_prompt)
        sent.with_prompt = has_prompt
        growth = RecordGrowth(
            record.request_id,
            head,
            tuple(_answer_growth(output, sent, place) for place, output in enumerate(record.outputs)),
            record.finished,
        )
        if record.finished:
            del self._sent[record.request_id]
        return growth


@dataclass(slots=True)
class Received:
    """The other side, for one request: lists that only grow, and records that are views of them."""

    head: RequestOutput | None = None
    texts: list[str] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[Mapping[int, float]]] = field(default_factory=list)

    def record(self, growth: RecordGrowth) -> RequestOutput:
        """Take what is new and return the record as it was on its rank."""
        if growth.head is not None:
            self.head = growth.head
        if self.head is None:
            raise ValueError(f"the first record of {growth.request_id!r} came without its head")
        for _ in range(len(self.texts), len(growth.answers)):
            self.texts.append("")
            self.token_ids.append([])
            self.logprobs.append([])
        outputs = tuple(self._output(place, answer) for place, answer in enumerate(growth.answers))
        return replace(self.head, outputs=outputs, finished=growth.finished)

    def _output(self, place: int, answer: AnswerGrowth) -> CompletionOutput:
        text = self.texts[place] = self.texts[place][: answer.kept_text] + answer.text
        token_ids, logprobs = self.token_ids[place], self.logprobs[place]
        token_ids += answer.token_ids
        logprobs += answer.logprobs or ()
        return CompletionOutput(
            answer.index,
            text,
            token_ids=Prefix(token_ids, len(token_ids)),
            logprobs=None if answer.logprobs is None else Prefix(logprobs, len(logprobs)),
            finish_reason=answer.finish_reason,
            stop_reason=answer.stop_reason,
            message=answer.message,
        )


def _answer_growth(output: CompletionOutput, sent: _Sent, place: int) -> AnswerGrowth:
    before = sent.texts[place]
    kept = len(before) if output.text.startswith(before) else 0
    token_ids = items_since(output, "token_ids", sent.tokens[place])
    logprobs = items_since(output, "logprobs", sent.tokens[place])
    sent.texts[place] = output.text
    sent.tokens[place] += len(token_ids or ())
    return AnswerGrowth(
        output.index,
        kept,
        output.text[kept:],
        token_ids or (),
        logprobs,
        output.finish_reason,
        output.stop_reason,
        output.message,
    )
