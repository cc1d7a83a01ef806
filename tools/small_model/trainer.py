"""The training run: two phases, the model and then its draft stages, saved and resumed between any two steps."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from deepinfer.model import ModelConfig

from .batches import make_batch
from .coaching import coach_weights
from .codecs import Codecs
from .configuration import compressed_ids
from .learning import Losses, learn, learn_drafts, make_optimiser
from .model import SmallModel
from .parameters import initial_weights
from .record import Measured, load_state, save_state, smooth, write_losses, write_made
from .run import Options
from .schedule import Plan, balance_rate_at, options_at, rate_at, recipe_at
from .skills import exact_match
from .team import Team
from .world import held_out_items

PHASES = ("model", "drafts")
_DRAFT_PROGRESS = 0.9
"""Drafts learn on the recipes of a late stage: every length."""
_FIRST_PLAN = 8
_GUESS = 2000
_SERVED = Options(codecs=Codecs(records=True, weights=True))


@dataclass(frozen=True)
class Settings:
    """What a run is a function of.

    Attributes:
        seed: of weights and sequences.
        rate: peak learning rate of the model.
        draft_rate: peak learning rate of the draft stages.
        minutes: time to fill; steps are planned from the measured speed. None where steps or a plan are given.
        draft_share: the drafts' part of the time.
        save_seconds: how often the state is saved and the rest planned again.
        skill_items: test items per row of the last table; the tables on the way have a fifth of it.
    """

    seed: int = 41
    rate: float = 3e-3
    draft_rate: float = 2e-3
    minutes: float | None = None
    draft_share: float = 0.12
    save_seconds: float = 300.0
    skill_items: int = 24


class Trainer:
    """One run in one folder."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        tokenizer: Tokenizer,
        config: ModelConfig,
        plans: dict[str, Plan] | None = None,
        team: Team | None = None,
    ) -> None:
        """Begin a run, or take up the one that the folder holds; ``plans`` by phase fix the steps."""
        self.folder, self.settings, self.tokenizer, self.config = folder, settings, tokenizer, config
        self.team = team or Team()
        self.model = SmallModel(config, compressed_ids(tokenizer, config))
        self.weights = initial_weights(config, settings.seed) | coach_weights(config, settings.seed)
        self.plans = plans or {phase: Plan([(0, 0.0, _GUESS)]) for phase in PHASES}
        self.phase, self.step, self.tokens = 0, 0, 0
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.history: list[Measured] = []
        self.skills: list[dict[str, Any]] = []
        self._optimiser_state: dict[str, Any] | None = None
        self._frozen: dict[str, Tensor] | None = None
        state = load_state(folder)
        if state is not None:
            self._take_up(state)

    def run(self, *, stop_after: int | None = None) -> dict[str, Any] | None:
        """Train to the end and write the checkpoint; ``stop_after`` ends earlier, after so many steps of this call."""
        left = stop_after
        while self.phase < len(PHASES):
            taken = self._run_phase(left)
            if left is not None:
                left -= taken
                if left <= 0:
                    return None
        return self._finish()

    def save(self) -> None:
        """Write everything that a later run needs to go on exactly as this one would."""
        if not self.team.leads:
            return
        save_state(self.folder, self._state())
        write_losses(self.folder, self.history)

    def _run_phase(self, most: int | None) -> int:
        phase = PHASES[self.phase]
        optimiser = make_optimiser(self.weights, drafts=phase == "drafts")
        if self._optimiser_state is not None:
            optimiser.load_state_dict(self._optimiser_state)
        self._optimiser = optimiser
        plan, taken, saved = self.plans[phase], 0, time.monotonic()
        with tqdm(total=1000, desc=phase, unit="‰", mininterval=1.0, disable=not self.team.leads) as bar:
            while (progress := plan.progress(self.step)) < 1.0 and (most is None or taken < most):
                began = time.monotonic()
                losses, tokens = self._one_step(phase, progress)
                self.step, self.tokens, taken = self.step + 1, self.tokens + tokens, taken + 1
                self.seconds[phase] += time.monotonic() - began
                self.history.append(
                    Measured(phase, self.step, progress, self.tokens, sum(self.seconds.values()), *_plain(losses))
                )
                bar.n = int(1000 * progress)
                bar.set_postfix(step=self.step, loss=f"{smooth([m.loss for m in self.history[-60:]])[-1]:.3f}")
                due = self.team.agreed(time.monotonic() - saved >= self.settings.save_seconds)
                if due or self.step == _FIRST_PLAN:
                    if due and phase == "model" and self.team.leads:
                        self._measure_skills(-(-self.settings.skill_items // 5))
                    self._plan_again(phase)
                    self.save()
                    saved = time.monotonic()
        self._optimiser_state = optimiser.state_dict()
        if plan.progress(self.step) >= 1.0:
            self.phase, self.step, self._optimiser_state = self.phase + 1, 0, None
        self.save()
        return taken

    def _one_step(self, phase: str, progress: float) -> tuple[Losses, int]:
        settings, drafting = self.settings, phase == "drafts"
        recipe = recipe_at(_DRAFT_PROGRESS if drafting else progress, self.step).part_of(self.team.size)
        # Both phases count from 0: the drafts see sequences that the model has not.
        number = self.step * self.team.size + self.team.rank
        batch = make_batch(self.tokenizer, recipe, settings.seed + drafting, number)
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
        balance_rate = balance_rate_at(progress)
        if drafting:
            rate = rate_at(progress, settings.draft_rate)
            losses = learn_drafts(
                self.model,
                self._served(),
                self.weights,
                self._optimiser,
                batch,
                rate,
                balance_rate,
                generator,
                self.team,
            )
        else:
            options, rate = options_at(progress, recipe), rate_at(progress, settings.rate)
            losses = learn(
                self.model, self.weights, self._optimiser, batch, options, rate, balance_rate, generator, self.team
            )
        return losses, batch.ids_BT.numel() * self.team.size

    def _served(self) -> dict[str, Tensor]:
        """Give the finished text model as the checkpoint will hold it."""
        if self._frozen is None:
            with torch.no_grad():
                self._frozen = dict(Codecs(weights=True).served(self.config, self.weights))
        return self._frozen

    def _plan_again(self, phase: str) -> None:
        if self.settings.minutes is None:
            return
        share = self.settings.draft_share if phase == "drafts" else 1.0 - self.settings.draft_share
        recent = [m.seconds for m in self.history if m.phase == phase][-200:]
        per_step = (recent[-1] - recent[0]) / max(len(recent) - 1, 1)
        left = self.settings.minutes * 60.0 * share - self.seconds[phase]
        self.plans[phase].again(self.step, left, max(per_step, 1e-3))
        self.plans[phase].knots = self.team.agreed(self.plans[phase].knots)

    def _measure_skills(self, count: int) -> dict[str, float]:
        began = time.monotonic()
        items = held_out_items(self.settings.seed, count)
        found = exact_match(self.model, self.weights, self.tokenizer, items, _SERVED)
        self.seconds["model"] += time.monotonic() - began
        self.skills.append({"phase": PHASES[min(self.phase, 1)], "step": self.step, "tokens": self.tokens, **found})
        tqdm.write(f"step {self.step}: " + ", ".join(f"{label} {value:.2f}" for label, value in found.items()))
        return found

    def _finish(self) -> dict[str, Any] | None:
        if not self.team.leads:
            return None
        items = held_out_items(self.settings.seed + 1, self.settings.skill_items)
        control = [item for item in items if item.task == "recall"]
        near = Options(codecs=_SERVED.codecs, long_range=False)
        facts = {
            "settings": asdict(self.settings),
            "plans": {phase: plan.knots for phase, plan in self.plans.items()},
            "tokens": self.tokens,
            "seconds": self.seconds,
            "threads": torch.get_num_threads(),
            "processes": self.team.size,
            "skills": exact_match(self.model, self.weights, self.tokenizer, items, _SERVED),
            "skills without long range": exact_match(self.model, self.weights, self.tokenizer, control, near),
        }
        return write_made(self.folder, self.config, self.weights, self.tokenizer, facts)

    def _state(self) -> dict[str, Any]:
        optimiser = getattr(self, "_optimiser", None)
        return {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "optimiser": self._optimiser_state
            if self._optimiser_state or optimiser is None
            else optimiser.state_dict(),
            "plans": {phase: plan.knots for phase, plan in self.plans.items()},
            "phase": self.phase,
            "step": self.step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "history": [tuple(row) for row in self.history],
            "skills": self.skills,
            "settings": asdict(self.settings),
            "processes": self.team.size,
        }

    def _take_up(self, state: dict[str, Any]) -> None:
        if state["settings"]["seed"] != self.settings.seed:
            message = f"{self.folder} holds a run of seed {state['settings']['seed']}; give another folder or that seed"
            raise SystemExit(message)
        for name, value in state["weights"].items():
            self.weights[name].data.copy_(value)
        self.plans = {phase: Plan([tuple(knot) for knot in knots]) for phase, knots in state["plans"].items()}
        self.phase, self.step, self.tokens = state["phase"], state["step"], state["tokens"]
        if state["processes"] != self.team.size:
            message = f"{self.folder} holds a run of {state['processes']} processes; go on with as many"
            raise SystemExit(message)
        self.seconds, self.skills = state["seconds"], state["skills"]
        self.history = [Measured(*row) for row in state["history"]]
        self._optimiser_state = state["optimiser"]


def _plain(losses: Losses) -> tuple[float, float, float]:
    return losses.total, losses.answers, losses.side
