"""The world: the same from the same seed, right answers, and a test split that training never says."""

from __future__ import annotations

import json
import random
import re

import pytest
from tokenizers import Tokenizer

from tools.small_model.batches import END_ID, Recipe, make_batch
from tools.small_model.vocabulary import NAMES
from tools.small_model.world import (
    DISTANCES,
    TASKS,
    Split,
    count_tokens,
    draw_item,
    held_out,
    held_out_items,
    preamble,
)


def test_a_seed_gives_the_same_items_and_another_seed_others() -> None:
    assert held_out_items(3, 2) == held_out_items(3, 2)
    assert held_out_items(3, 2) != held_out_items(4, 2)
    assert {item.task for item in held_out_items(3, 1)} == set(TASKS)


def test_a_recalled_value_stands_in_the_prompt_at_about_the_asked_distance(tokenizer: Tokenizer) -> None:
    for distance in DISTANCES:
        item = draw_item("recall", random.Random(distance), "test", distance)
        name = re.search(r"\nTell: (\w+) has$", item.prompt)
        assert name is not None
        assert item.prompt.count(f"{name[1]} has{item.answer}.") == 1
        before = item.prompt[: item.prompt.index(f"{name[1]} has{item.answer}.") + len(f"{name[1]} has{item.answer}")]
        tokens = len(tokenizer.encode(item.prompt).ids) - len(tokenizer.encode(before).ids)
        assert tokens == item.distance
        assert distance - 12 <= item.distance <= distance


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_are_right(split: Split) -> None:
    rng = random.Random(5)
    for _ in range(50):
        addends = draw_item("sum", rng, split)
        first, second = map(int, re.findall(r"\d+", addends.prompt))
        assert int(addends.answer) == first + second
        record = draw_item("json", rng, split)
        fields = re.findall(r"(\w+) (?:text|number|flag)[,:]", record.prompt)
        assert list(json.loads(record.answer)) == fields
        brackets = draw_item("brackets", rng, split)
        closing = brackets.answer.split()
        assert [")]}>"["([{<".index(each)] for each in brackets.prompt.split()[1:-1]][::-1] == closing


def test_training_says_nothing_that_is_held_out(tokenizer: Tokenizer) -> None:
    for step in range(6):
        batch = make_batch(tokenizer, Recipe(2, 400), 7, step)
        text = " ".join(tokenizer.decode_batch(batch.ids_BT.tolist(), skip_special_tokens=False))
        for first, second in re.findall(r"What is (\d+) \+ (\d+)\?", text):
            assert not held_out(f"sum {(int(first), int(second))}")
        stated = re.findall(r"\b([A-Z]\w+) has (\w+)", text)
        assert stated
        for name, thing in stated:
            # A sequence may end inside a word of several tokens, but here every word is one.
            assert name in NAMES
            assert not held_out(f"recall {name} {thing}")


def test_every_piece_of_the_world_is_one_token(tokenizer: Tokenizer) -> None:
    texts = [text for item in held_out_items(1, 12) for text in (item.prompt, item.answer)]
    texts.append(preamble(random.Random(2), 900, 40, "train").text)
    for text in texts:
        assert len(tokenizer.encode(text).ids) == count_tokens(text), text


def test_a_batch_depends_on_seed_and_step_alone(tokenizer: Tokenizer) -> None:
    recipe = Recipe(3, 90)
    first = make_batch(tokenizer, recipe, 1, 5)
    make_batch(tokenizer, recipe, 1, 6)
    again = make_batch(tokenizer, recipe, 1, 5)
    assert first.ids_BT.equal(again.ids_BT)
    assert first.weight_BT.equal(again.weight_BT)
    assert not first.ids_BT.equal(make_batch(tokenizer, recipe, 2, 5).ids_BT)


def test_every_answer_is_weighed_with_its_stop_token(tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer, Recipe(4, 200), 1, 1)
    weights = batch.weight_BT[batch.ids_BT == END_ID]
    assert weights.numel()
    assert set(weights.tolist()) <= {1.0, 0.10000000149011612}
    assert (weights == 1.0).float().mean() > 0.5
