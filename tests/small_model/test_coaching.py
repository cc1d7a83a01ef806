"""The training aids: they know where a fact was stated, and they teach what they are for."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer.model import ModelConfig
from tools.small_model.batches import Batch, Recipe, make_batch
from tools.small_model.coaching import PREFIX, coach_weights, echo_loss, guide_loss
from tools.small_model.configuration import compressed_ids
from tools.small_model.learning import learn, make_optimiser
from tools.small_model.model import Passed, SmallModel
from tools.small_model.parameters import initial_weights
from tools.small_model.run import Options
from tools.small_model.team import Team
from tools.small_model.world import question

ATTEND_ALL = Options(attend_all=True, coaching=1.0)
PICKS = Options(explore=4, coaching=1.0, dense_entries=0)


def passed(thin: ModelConfig, tokenizer: Tokenizer, batch: Batch, options: Options) -> Passed:
    weights = initial_weights(thin, 1) | coach_weights(thin, 1)
    for weight in weights.values():
        weight.requires_grad_()
    generator = torch.Generator().manual_seed(1)
    return SmallModel(thin, compressed_ids(tokenizer, thin)).forward(weights, batch.ids_BT, options, generator)


def one_question(tokenizer: Tokenizer) -> Batch:
    """A document that states the fact up to position 8, and its question."""
    text = f"Notes: Bruno has coin. Olga has key. Anna has key.{question('Olga')} key"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    recalled = torch.zeros(1, len(ids), dtype=torch.bool)
    recalled[0, -1] = True
    return Batch(torch.tensor([ids]), torch.zeros(1, len(ids)), recalled)


def test_questions_are_asked_in_the_tokens_of_their_statement(tokenizer: Tokenizer) -> None:
    batch = one_question(tokenizer)
    ids = batch.ids_BT[0].tolist()
    assert tokenizer.decode([ids[8]]) == " key"
    assert ids[6:9] == ids[-3:]


@pytest.mark.parametrize("mass", [0.0, 0.25, 1.0])
def test_the_guide_counts_attention_on_the_entry_that_states_the_answer(
    thin: ModelConfig, tokenizer: Tokenizer, mass: float
) -> None:
    batch = one_question(tokenizer)
    run = passed(thin, tokenizer, batch, ATTEND_ALL).run
    row = batch.ids_BT.shape[1] - 2
    for shared in run.far_shares:
        with torch.no_grad():
            shared.share_BTK.zero_()
            shared.share_BTK[0, row, 4] = 1.0 - mass  # another one's thing
            if shared.share_BTK.shape[2] == run.length:
                shared.share_BTK[0, row, 8] = mass
    assert guide_loss(run, batch).item() == pytest.approx(-torch.tensor(mass + 1e-4).log().item(), abs=1e-5)


@pytest.mark.parametrize("options", [ATTEND_ALL, PICKS])
def test_the_aids_reach_what_they_teach(thin: ModelConfig, tokenizer: Tokenizer, options: Options) -> None:
    batch = make_batch(tokenizer, Recipe(2, 96, recall_share=0.9), 1, 1)
    assert batch.recalled_BT.any()
    run = passed(thin, tokenizer, batch, options).run
    (guide_loss(run, batch) + echo_loss(run, batch.ids_BT)).backward()  # type: ignore[no-untyped-call]
    moved = {name for name, weight in run.weights.items() if weight.grad is not None and weight.grad.any()}
    owners = thin.kv_source_layer_ids
    assert {f"layers.{max(owners)}.attn.compressor.wkv.weight", f"layers.{max(owners)}.attn.wq_b.weight"} <= moved
    assert {name for name in moved if name.startswith(PREFIX)} == set(coach_weights(thin, 1))


def test_without_questions_the_guide_is_silent(thin: ModelConfig, tokenizer: Tokenizer) -> None:
    batch = make_batch(tokenizer, Recipe(1, 48, recall_share=0.0), 1, 1)
    assert not batch.recalled_BT.any()
    assert guide_loss(passed(thin, tokenizer, batch, ATTEND_ALL).run, batch).item() == 0.0


def test_a_team_goes_on_once_the_aids_have_faded_out(
    thin: ModelConfig, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.small_model.team.distributed.all_reduce", lambda _: None)
    model = SmallModel(thin, compressed_ids(tokenizer, thin))
    weights = initial_weights(thin, 1) | coach_weights(thin, 1)
    before = {name: weight.clone() for name, weight in weights.items()}
    optimiser, batch = make_optimiser(weights, drafts=False), make_batch(tokenizer, Recipe(2, 40), 1, 1)
    options = Options(attend_all=True, index_loss=True)
    learn(model, weights, optimiser, batch, options, 3e-3, 1e-3, torch.Generator().manual_seed(1), Team(0, 2))
    assert all(weights[name].equal(before[name]) for name in coach_weights(thin, 1))
    assert not weights["head.weight"].equal(before["head.weight"])
