"""Text that grows token by token: no character is split, none is handed out twice, none is taken back."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from deepinfer.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns the tokens of one answer into text as they come.

    The pieces put together are ``tokenizer.decode`` of the same ids, however they were cut. Bytes that cannot be text
    become U+FFFD at once; bytes that may still become a character are held, and :meth:`finish` hands them out as one
    U+FFFD.

    The text depends on the answer's own tokens only. An answer that begins in the middle of a character (the prompt's
    ids ended there) therefore begins with U+FFFD, unless the prompt is given: then the character is completed and
    handed out whole, with the answer. The prompt's own text is never handed out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_token_ids: Iterable[int] | None = None,
    ) -> None:
        """Start an empty text.

        Args:
            tokenizer: whose tokens will come.
            skip_special_tokens: leave control marks out, as if they had not come: two halves of a character around
                one are joined.
            prompt_token_ids: complete a character that this prompt left open.
        """
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for token_id in prompt_token_ids or ():
            self.add(token_id)

    def add(self, token_id: int) -> str:
        """Return the text that this token adds, possibly none."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """Return what was held, as U+FFFD; a second call returns nothing."""
        return self._decoder.decode(b"", final=True)
