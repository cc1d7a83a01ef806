"""The text of one answer, from its tokens to what may be shown."""

from __future__ import annotations

from collections.abc import Sequence

from deepinfer.tokenizer.detokenizer import IncrementalDetokenizer
from deepinfer.tokenizer.stop_strings import StopStringMatcher
from deepinfer.tokenizer.tokenizer import Tokenizer


class OutputText:
    """Detokenises an answer and ends it at a stop string; its text only ever grows."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: whose tokens will come.
            stop: stop strings, none of them empty.
            include_stop: keep the stop string at the end of the text.
            skip_special_tokens: leave control marks out.
        """
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._matcher = StopStringMatcher(stop, include_stop=include_stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything that may be shown so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def add(self, token_id: int, *, may_stop: bool = True) -> str | None:
        """Take the next token and return the stop string that it completed, or None.

        A token that itself ended the request (an end token, a stop id) is text like any other: leave it out here
        unless its text is wanted.

        Args:
            token_id: the token.
            may_stop: whether a stop string counts yet.
        """
        match = self._matcher.add(self._detokenizer.add(token_id), may_stop=may_stop)
        self._pieces.append(match.text)
        return match.stop

    def finish(self) -> str:
        """Release what was held back, when no more tokens come, and return the whole text."""
        tail = self._matcher.add(self._detokenizer.finish(), may_stop=False)
        self._pieces += (tail.text, self._matcher.finish())
        return self.text
