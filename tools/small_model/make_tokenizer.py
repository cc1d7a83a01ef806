"""Makes the tokenizer: byte-level BPE, learned from the world's own text, the same bytes every time.

Run from the root of the repository:

    python -m tools.small_model.make_tokenizer tokenizer.json
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from .vocabulary import CITIES, COLOURS, FACTS, FIELDS, NAMES, PHRASES, THINGS
from .world import PIECE, TASKS, draw_item, preamble

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
IMAGE, NOISE = "<|image|>", "<|noise|>"
VOCABULARY = 1376
_ITEMS = 6000


def texts() -> Iterator[str]:
    """Give the text that merges are learned from: everything the world can say, each kind often enough."""
    rng = random.Random("tokenizer")
    for number in range(_ITEMS):
        item = draw_item(TASKS[number % len(TASKS)], rng, "train", rng.choice((10, 40, 80)))
        yield item.prompt
        yield item.answer
    for _ in range(200):
        yield preamble(rng, 300, 16, "train").text
    # Rare words must win their merges as well.
    whole = [*chain.from_iterable(FACTS), *(" ".join(words) for words in PHRASES), *NAMES, *THINGS, *CITIES, *COLOURS]
    whole += [*chain.from_iterable(FIELDS), "0", "true", "false"]
    for text in whole:
        yield from [text, f" {text}"] * 20


def make_tokenizer(vocabulary: int = VOCABULARY) -> Tokenizer:
    """Train the tokenizer; ids 0, 1, 2 are begin, end and pad, the last two image and noise.

    Raises:
        SystemExit: if the world has too few words to fill the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - 2,
        show_progress=False,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True), AddedToken(NOISE, special=True)])
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocabulary:
        message = (
            f"the tokenizer has {size} entries and should have {vocabulary}: the world's text gives no more merges"
        )
        raise SystemExit(message)
    return tokenizer


def main() -> None:
    """Write the tokenizer to the file that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="file to write")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY, help=f"entries, default {VOCABULARY}")
    arguments = parser.parse_args()
    make_tokenizer(arguments.vocabulary).save(str(arguments.file), pretty=False)


if __name__ == "__main__":
    main()
