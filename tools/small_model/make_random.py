"""Makes the packaged model: random weights in the released form, and a byte-level tokenizer of its own.

Run from the root of the repository, with an empty or absent output directory:

    python tools/small_model/make_random.py deepinfer/_models/small

The text that such a model writes is noise. It exists so that every part can be run without a download.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from deepinfer.model import ModelConfig
from deepinfer.model.checkpoint import make_checkpoint
from deepinfer.model.presets import preset

BEGIN, END, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
IMAGE, NOISE = "<|image|>", "<|noise|>"

# What the pair merges are learned from: ordinary English and a little code, written for this purpose.
CORPUS = (
    "The engine reads a prompt, splits it into tokens and gives every token a position. A scheduler decides which "
    "requests take part in the next step, how many positions each of them runs, and where their memory lies.",
    "Each layer looks back through a small window, and some layers also look further: they keep one entry for every "
    "token, or one for every two tokens, and choose the entries that matter most for the question at hand.",
    "When the last layer is done, the model has a score for every word it knows. The sampler turns the scores into "
    "chances, draws one word, and the next step begins. This goes on until the text ends or the limit is reached.",
    "Once upon a time there was a house with many rooms. In the first room they counted numbers, in the second they "
    "wrote down names, and in the third room somebody was always asking whether the numbers and the names agreed.",
    "What is the weather like in the mountains? It is cold in the morning, warm in the afternoon, and there is snow "
    "on the highest peaks. Where does the water of the river come from? It comes from the snow.",
    "def add(first, second):\n    return first + second\n\nfor number in range(10):\n"
    "    print(number, add(number, 1))\n",
    "Hello, world! How are you today? I am fine, thank you. Please tell me a story about the sea and the stars.",
)


def make_tokenizer(config: ModelConfig) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose special ids are those of ``config``.

    Raises:
        SystemExit: if the vocabulary does not come out as the configuration says.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - 2,
        show_progress=False,
        special_tokens=[BEGIN, END, PAD],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(IMAGE, special=True), AddedToken(NOISE, special=True)])
    wanted = {
        BEGIN: config.bos_token_id,
        END: config.eos_token_id,
        PAD: config.pad_token_id,
        IMAGE: config.image_token_id,
        NOISE: config.dspark_noise_token_id,
    }
    found = {token: tokenizer.token_to_id(token) for token in wanted}
    if found != wanted or tokenizer.get_vocab_size(with_added_tokens=True) != config.vocab_size:
        message = f"the tokenizer came out as {found} of {tokenizer.get_vocab_size()}, the configuration needs {wanted}"
        raise SystemExit(message)
    return tokenizer


def main() -> None:
    """Write the checkpoint, then the tokenizer beside it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory to write; must be empty or absent")
    parser.add_argument("--config", default="small", help="preset name or config.json, default small")
    parser.add_argument("--seed", type=int, default=41, help="seed of the weights, default 41")
    arguments = parser.parse_args()
    config = preset(arguments.config)
    tokenizer = make_tokenizer(config)
    make_checkpoint(config, arguments.seed, arguments.out, "released")
    tokenizer.save(str(arguments.out / "tokenizer.json"), pretty=False)


if __name__ == "__main__":
    main()
