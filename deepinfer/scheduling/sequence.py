"""One request as the scheduler sees it: its tokens, its rules for stopping, and where it stands."""

from __future__ import annotations

from bisect import bisect_right
from collections import abc
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer.errors import ArgumentError
from deepinfer.scheduling.states import Place, Status
from deepinfer.scheduling.table import NO_ROW, NO_TOKEN, SequenceTable


@dataclass(frozen=True, slots=True)
class StopRules:
    """When a request ends by itself; text stops belong to the layer that makes text.

    ``max_tokens`` may be as large as the caller likes: nothing is reserved by it.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_id: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse rules under which no token could be made."""
        if self.max_tokens < 1:
            raise ArgumentError("stop rules", [f"max_tokens must be at least 1, got {self.max_tokens}"])

    def is_end(self, token_id: int) -> bool:
        """Say whether the token is the end token, and ends the request."""
        return token_id == self.eos_token_id and not self.ignore_eos

    def is_stop(self, token_id: int) -> bool:
        """Say whether the token ends the request, whatever its place."""
        return token_id in self.stop_token_ids or self.is_end(token_id)


class ImageSpan(NamedTuple):
    """Positions ``start`` to ``stop - 1`` hold one image; no chunk boundary falls inside."""

    start: int
    stop: int


class Sequence:
    """A request's tokens and progress.

    Progress lives where memory lives: while the request owns a row of the sequence table, its length, its computed
    positions and its blocks are columns there; a request without a row owns nothing and has computed nothing.
    ``status`` and ``place`` are changed by ``states.move`` alone.

    Attributes:
        arrival: order in which the scheduler first saw it; ties of every rule are broken by it.
        root_arrival: the arrival of the request it was forked from, through all generations; else its own.
        schedulable: False while something outside (an image worker) still prepares its prompt.
        num_prompt_tokens: tokens of the prompt; for a fork, its parent's whole history.
        root_prompt_tokens: tokens of the prompt of the request it was forked from, through all generations.
        is_continuation: its tokens were computed before, so the limits on a fresh prompt do not apply to it.
        preemptions: how many times it lost its memory.
    """

    __slots__ = (
        "_outputs",
        "_table",
        "arrival",
        "chunk_checkpoints",
        "image_spans",
        "is_continuation",
        "num_prompt_tokens",
        "place",
        "preemptions",
        "prompt_token_ids",
        "request_id",
        "root_arrival",
        "root_prompt_tokens",
        "row",
        "schedulable",
        "status",
        "stop_rules",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: ArrayLike,
        stop_rules: StopRules,
        *,
        image_spans: abc.Iterable[tuple[int, int]] = (),
        chunk_checkpoints: abc.Iterable[int] = (),
        schedulable: bool = True,
    ) -> None:
        """Describe a request; ``chunk_checkpoints`` are positions at which a prompt chunk must end."""
        self.request_id = request_id
        self.prompt_token_ids: NDArray[np.int64] = np.array(prompt_token_ids, dtype=np.int64)
        self.prompt_token_ids.setflags(write=False)
        self.num_prompt_tokens = self.prompt_token_ids.size
        self.root_prompt_tokens = self.num_prompt_tokens
        self.stop_rules = stop_rules
        # Most requests have neither.
        self.image_spans = tuple(ImageSpan(*span) for span in sorted(image_spans)) if image_spans else ()
        self.chunk_checkpoints = tuple(sorted(set(chunk_checkpoints))) if chunk_checkpoints else ()
        self.schedulable = schedulable
        self._refuse_bad_prompt()
        self.status = Status.WAITING
        self.place = Place.NOWHERE
        self.arrival = 0
        self.root_arrival = 0
        self.is_continuation = False
        self.preemptions = 0
        self.row = NO_ROW
        self._table: SequenceTable | None = None
        self._outputs: list[int] = []

    @property
    def length(self) -> int:
        """Prompt and output tokens, the newest included."""
        if self._table is None:
            return self.num_prompt_tokens + len(self._outputs)
        return int(self._table.length[self.row])

    @property
    def num_output_tokens(self) -> int:
        """Tokens made so far."""
        return self.length - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Positions whose cache is ready."""
        return 0 if self._table is None else int(self._table.computed[self.row])

    @property
    def output_token_ids(self) -> abc.Sequence[int]:
        """The tokens made so far; valid until the next commit."""
        if self._table is not None:
            self._outputs.extend(self._table.drain_tokens(self.row))
        return self._outputs

    @property
    def num_blocks(self) -> int:
        """Blocks in its table."""
        return 0 if self._table is None else int(self._table.num_blocks[self.row])

    @property
    def block_table(self) -> NDArray[np.int32]:
        """A copy of its block numbers, in order of positions."""
        blocks = [] if self._table is None else self._table.blocks_of(self.row)
        return np.array(blocks, dtype=np.int32)

    @property
    def state_slot(self) -> int:
        """Its state slot, which is also its row of the sequence table; 0 when it owns none."""
        return self.row

    @property
    def epoch(self) -> int:
        """The number of the current occupation of its row; a result that carries another number is stale."""
        return -1 if self._table is None else int(self._table.epoch[self.row])

    def token_limit(self, max_model_len: int) -> int:
        """Return the length at which it ends: by ``max_tokens``, or by the token made from the last position."""
        return min(self.num_prompt_tokens + self.stop_rules.max_tokens, max_model_len + 1)

    def token_ids(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens at positions ``start`` to ``stop - 1``, prompt and output."""
        prompt = self.prompt_token_ids[start:stop]
        if stop <= self.num_prompt_tokens:
            return prompt
        first_output = max(start - self.num_prompt_tokens, 0)
        outputs = self.output_token_ids[first_output : stop - self.num_prompt_tokens]
        return np.concatenate([prompt, np.asarray(outputs, dtype=np.int64)])

    def history_before(self, position: int, count: int) -> NDArray[np.int64]:
        """Return the ``count`` token ids before ``position``, nearest first.

        NO_TOKEN stands where there is none and on image positions: both stop the n-gram memory alike.
        """
        history = np.full(count, NO_TOKEN, dtype=np.int64)
        tokens = self.tokens_before(position, count)
        history[: len(tokens)] = tokens[::-1]
        return history

    def tokens_before(self, position: int, count: int) -> NDArray[np.int64]:
        """Return what ``history_before`` does, nearest last, and fewer where the prompt begins."""
        start = max(position - count, 0)
        tokens = self.token_ids(start, position)
        for span in self.image_spans:
            if span.start < position and span.stop > start:
                tokens = tokens.copy()
                tokens[max(span.start - start, 0) : span.stop - start] = NO_TOKEN
        return tokens

    def image_span_across(self, position: int) -> ImageSpan | None:
        """Return the image span that a chunk boundary at ``position`` would split."""
        index = bisect_right(self.image_spans, position, key=lambda span: span.start) - 1
        if index >= 0 and self.image_spans[index].start < position < self.image_spans[index].stop:
            return self.image_spans[index]
        return None

    def checkpoint_after(self, position: int) -> int | None:
        """Return the first chunk checkpoint behind ``position``."""
        index = bisect_right(self.chunk_checkpoints, position)
        return self.chunk_checkpoints[index] if index < len(self.chunk_checkpoints) else None

    def occupy(self, table: SequenceTable, row: int) -> None:
        """Tie its progress to ``row`` of ``table``, which the memory has just filled."""
        self._table = table
        self.row = row

    def vacate(self) -> None:
        """Take its output tokens along and untie it from its row."""
        if self._table is not None:
            self._outputs.extend(self._table.drain_tokens(self.row))
        self._table = None
        self.row = NO_ROW

    def receive_drained(self, tokens: abc.Iterable[int]) -> None:
        """Take over output tokens that the table gives up to make room."""
        self._outputs.extend(tokens)

    def _refuse_bad_prompt(self) -> None:
        problems = []
        if self.prompt_token_ids.ndim != 1 or not len(self.prompt_token_ids):
            problems.append(
                f"a prompt is a list of at least one token id, got shape {list(self.prompt_token_ids.shape)}"
            )
        length = self.prompt_token_ids.size
        previous_stop = 0
        for span in self.image_spans:
            if not previous_stop <= span.start < span.stop <= length:
                problems.append(f"image span {tuple(span)} is empty, overlaps another or leaves the prompt of {length}")
            previous_stop = max(previous_stop, span.stop)
        problems += [
            f"chunk checkpoint {position} lies outside the prompt of {length}"
            for position in self.chunk_checkpoints
            if not 0 < position <= length
        ]
        if problems:
            raise ArgumentError(f"request {self.request_id!r}", problems)
