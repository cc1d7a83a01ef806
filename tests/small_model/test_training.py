"""Training: a step lowers the loss, a resumed run is the uninterrupted one, and the engine serves what was trained."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from deepinfer import LLM
from deepinfer.model import ModelConfig
from tools.small_model import schedule
from tools.small_model.batches import Recipe, make_batch
from tools.small_model.codecs import Codecs
from tools.small_model.configuration import compressed_ids
from tools.small_model.learning import learn, make_optimiser
from tools.small_model.model import SmallModel
from tools.small_model.parameters import initial_weights
from tools.small_model.record import smooth, text_plot
from tools.small_model.run import Options
from tools.small_model.schedule import Plan
from tools.small_model.skills import exact_match
from tools.small_model.team import Team
from tools.small_model.trainer import Settings, Trainer
from tools.small_model.world import held_out_items

SETTINGS = Settings(seed=5, skill_items=0)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of pass in a few steps over short sequences."""
    stages = (schedule.Stage(0.6, (Recipe(2, 24),)), schedule.Stage(1.01, (Recipe(1, 48), Recipe(2, 24))))
    monkeypatch.setattr(schedule, "STAGES", stages)
    monkeypatch.setattr(schedule, "PICKS_FROM", 0.3)


def plans() -> dict[str, Plan]:
    return {"model": Plan([(0, 0.0, 5)]), "drafts": Plan([(0, 0.0, 2)])}


@pytest.mark.parametrize(
    "options",
    [
        Options(attend_all=True, index_loss=True),
        Options(explore=2, index_loss=True, dense_entries=0),
        Options(codecs=Codecs(records=True, weights=True), index_loss=True),
    ],
)
def test_steps_lower_the_loss_of_their_batch(thin: ModelConfig, tokenizer: Tokenizer, options: Options) -> None:
    model, weights = SmallModel(thin, compressed_ids(tokenizer, thin)), initial_weights(thin, 1)
    optimiser, batch = make_optimiser(weights, drafts=False), make_batch(tokenizer, Recipe(2, 40), 1, 1)
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    losses = [
        learn(model, weights, optimiser, batch, options, 3e-3, 1e-3, torch.Generator().manual_seed(1), Team()).total
        for _ in range(4)
    ]
    assert losses[3] < losses[0] - 0.05
    still = {name for name, weight in weights.items() if weight.equal(before[name])}
    assert still == {name for name in weights if name.startswith("mtp.") or name.endswith("bias_vl")}


def test_the_indexer_learns_from_its_own_loss_alone(thin: ModelConfig, tokenizer: Tokenizer) -> None:
    model, weights = SmallModel(thin, compressed_ids(tokenizer, thin)), initial_weights(thin, 1)
    for weight in weights.values():
        weight.requires_grad_()
    batch = make_batch(tokenizer, Recipe(1, 40), 1, 1)
    passed = model.forward(weights, batch.ids_BT, Options(index_loss=True))
    passed.index_loss.backward()  # type: ignore[no-untyped-call]
    moved = {name for name, weight in weights.items() if weight.grad is not None and weight.grad.any()}
    assert moved == {name for name in weights if ".indexer." in name}


@pytest.mark.usefixtures("brief")
def test_a_resumed_run_is_the_uninterrupted_one(thin: ModelConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    made = Trainer(whole, SETTINGS, tokenizer, thin, plans()).run()
    for steps in (2, 4):  # the second part ends among the drafts
        assert Trainer(parts, SETTINGS, tokenizer, thin, plans()).run(stop_after=steps) is None
    again = Trainer(parts, SETTINGS, tokenizer, thin).run()
    assert made is not None
    assert again is not None
    assert made["sha256"] == again["sha256"]


@pytest.mark.usefixtures("brief")
def test_the_engine_serves_what_was_trained(thin: ModelConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, SETTINGS, tokenizer, thin, plans())
    trainer.run()
    made = json.loads((tmp_path / "made.json").read_text(encoding="utf-8"))
    directory = tmp_path / "checkpoint"
    for name, digest in made["sha256"].items():
        assert hashlib.sha256((directory / name).read_bytes()).hexdigest() == digest
    assert set(made["sha256"]) == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (tmp_path / "loss.csv").read_text(encoding="utf-8").count("\n") == 8

    ids = tokenizer.encode("What is 12 + 30?").ids * 4
    with torch.no_grad():
        options = Options(codecs=Codecs(weights=True))
        passed = trainer.model.forward(trainer.weights, torch.tensor([ids]), options)
        expected = trainer.model.logits(passed.run, passed.hidden_BTD[0])
    logits = LLM(directory, "cpu_ref", kv_cache_dtype="float32").logits(ids)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_another_seed_does_not_take_up_a_run(thin: ModelConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    Trainer(tmp_path, SETTINGS, tokenizer, thin, plans()).save()
    with pytest.raises(SystemExit, match="seed 5"):
        Trainer(tmp_path, replace(SETTINGS, seed=6), tokenizer, thin, plans())


def test_a_plan_made_again_goes_on_from_where_progress_is() -> None:
    plan = Plan([(0, 0.0, 100)])
    plan.again(50, seconds_left=30.0, seconds_per_step=1.0)
    assert plan.progress(49) == pytest.approx(0.49)
    assert plan.progress(50) == pytest.approx(0.5)
    assert plan.progress(65) == pytest.approx(0.75)
    assert plan.progress(80) == 1.0
    plan.again(70, seconds_left=-5.0, seconds_per_step=1.0)  # the time is over: one last step
    assert plan.progress(70) < 1.0 == plan.progress(71)


def test_exact_match_tells_a_right_answer_from_a_wrong_one(thin: ModelConfig, tokenizer: Tokenizer) -> None:
    """A model that always says the stop token is right about nothing; the perplexity of sentences is above one."""
    model, weights = SmallModel(thin, compressed_ids(tokenizer, thin)), initial_weights(thin, 1)
    found = exact_match(model, weights, tokenizer, [item for item in held_out_items(1, 1) if item.distance <= 100])
    assert found.pop("sentence") > 1.0
    assert set(found.values()) == {0.0}


def test_the_text_plot_falls_with_its_values() -> None:
    lines = text_plot([10.0 / (1 + step) for step in range(100)]).splitlines()
    assert lines[0].startswith("  10.000 |*")
    assert lines[-2].rstrip().endswith("*")
    assert smooth([1.0, 1.0]) == [1.0, 1.0]


def _train_in_team(rank: int, folder: str, config: ModelConfig, tokenizer_text: str) -> None:
    torch.set_num_threads(1)
    team = Team.join(rank, 2, Path(folder) / "meeting")
    own = Path(folder) / str(rank)
    trainer = Trainer(own, SETTINGS, Tokenizer.from_str(tokenizer_text), config, plans(), team)
    trainer.run(stop_after=1)
    torch.save(trainer.weights, own / "weights.pt")
    team.leave()


def test_two_processes_have_one_model_that_learned_from_both(
    thin: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    torch.multiprocessing.spawn(_train_in_team, (str(tmp_path), thin, tokenizer.to_str()), nprocs=2)
    first, second = (torch.load(tmp_path / rank / "weights.pt") for rank in ("0", "1"))
    assert all(first[name].equal(second[name]) for name in first)
    assert not first["embed.weight"].equal(initial_weights(thin, SETTINGS.seed)["embed.weight"])
    assert (tmp_path / "0" / "state.pt").exists()
    assert not (tmp_path / "1" / "state.pt").exists()
    alone = Trainer(tmp_path / "1", SETTINGS, tokenizer, thin, plans())
    alone.run(stop_after=1)
    assert not first["embed.weight"].equal(alone.weights["embed.weight"])
