"""The tokenizer: the same bytes each time, ids where the released model has them."""

from __future__ import annotations

from tokenizers import Tokenizer

from deepinfer.tokenizer import Tokenizer as EngineTokenizer
from tools.small_model.make_tokenizer import BEGIN, END, IMAGE, NOISE, PAD, VOCABULARY, make_tokenizer


def test_bytes_are_the_same_each_time(tokenizer: Tokenizer) -> None:
    assert make_tokenizer().to_str() == tokenizer.to_str()


def test_special_ids(tokenizer: Tokenizer) -> None:
    wanted = {BEGIN: 0, END: 1, PAD: 2, IMAGE: VOCABULARY - 2, NOISE: VOCABULARY - 1}
    assert {token: tokenizer.token_to_id(token) for token in wanted} == wanted
    assert 1024 <= tokenizer.get_vocab_size() <= 2048


def test_the_engine_accepts_it_and_gives_any_text_back(tokenizer: Tokenizer) -> None:
    engine = EngineTokenizer(tokenizer)
    for text in ("Why is the sky blue?", "zwölf Ärzte\n\t12 + 7", ' {"a": [1, 2]}', "日本"):
        assert engine.decode(engine.encode(text)) == text
