"""What a model can do, measured with the trainer's own forward pass: exact match per task and distance.

An answer is right if every token of it, and the stop token, is the most likely one behind the right tokens before it:
that is exactly when greedy decoding writes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from .batches import END_ID, PAD_ID
from .model import SmallModel
from .parameters import Weights
from .run import Options
from .world import DISTANCES, Item, Task

_TOKENS_AT_ONCE = 8192


def row_of(item: Item) -> tuple[Task, int]:
    """Give the row that an item counts for: its task, and the asked distance that is nearest to its own by ratio."""
    if not item.distance:
        return item.task, 0
    return item.task, min(DISTANCES, key=lambda asked: max(asked / item.distance, item.distance / asked))


def label_of(item: Item) -> str:
    """Name the row of the table that an item counts for."""
    task, distance = row_of(item)
    return f"{task} {distance}" if distance else task


@torch.no_grad()
def exact_match(
    model: SmallModel, weights: Weights, tokenizer: Tokenizer, items: Sequence[Item], options: Options | None = None
) -> dict[str, float]:
    """Give the share of right answers per row of the table; for sentences the perplexity of the rest instead."""
    options = options or Options()
    # Once for all items instead of once a pass.
    weights = options.codecs.served(model.config, weights)
    options = replace(options, codecs=replace(options.codecs, weights=False))
    found: dict[str, list[float]] = {label_of(item): [] for item in items}
    coded = [
        (
            item,
            tokenizer.encode(item.prompt, add_special_tokens=False).ids,
            [*tokenizer.encode(item.answer, add_special_tokens=False).ids, END_ID],
        )
        for item in items
    ]
    coded.sort(key=lambda each: len(each[1]) + len(each[2]))
    while coded:
        longest = len(coded[-1][1]) + len(coded[-1][2])
        group = [coded.pop() for _ in range(min(len(coded), max(1, _TOKENS_AT_ONCE // longest)))]
        ids = torch.full((len(group), longest), PAD_ID)
        for row, (_, prompt, answer) in enumerate(group):
            ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        passed = model.forward(weights, ids, options)
        for row, (item, prompt, answer) in enumerate(group):
            hidden = passed.hidden_BTD[row, len(prompt) - 1 : len(prompt) + len(answer) - 1]
            logits, wanted = model.logits(passed.run, hidden), torch.tensor(answer)
            if item.task == "sentence":
                found[label_of(item)].append(float(cross_entropy(logits, wanted)))
            else:
                found[label_of(item)].append(float((logits.argmax(-1) == wanted).all()))
    means = {label: sum(values) / len(values) for label, values in found.items()}
    if "sentence" in means:
        means["sentence"] = float(torch.tensor(means["sentence"]).exp())
    return means
