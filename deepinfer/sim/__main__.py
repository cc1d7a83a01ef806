"""``python -m deepinfer.sim``: live one life, or many, and say what went wrong."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from deepinfer.errors import DeepInferError
from deepinfer.sim.agreement import live_in_worlds
from deepinfer.sim.life import LifeReport, live
from deepinfer.sim.model import make_simulated_model


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return the exit status: 0 if nothing went wrong in any life."""
    parser = argparse.ArgumentParser(prog="python -m deepinfer.sim", description=__doc__)
    parser.add_argument("--seed", type=_at_least(0), default=0, help="the first life to live (default 0)")
    parser.add_argument("--seeds", type=_at_least(1), default=1, help="how many lives, from SEED up (default 1)")
    parser.add_argument(
        "--steps", type=_at_least(1), default=200, help="engine steps with traffic in each (default 200)"
    )
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="compute a small model on the oracle driver instead of the quick shadow memory",
    )
    parser.add_argument(
        "--async-scheduling",
        action=argparse.BooleanOptionalAction,
        help="plan steps ahead in every life, or in none (default: half of the seeds do)",
    )
    parser.add_argument(
        "--drafts", type=_at_least(0), help="drafts of a step in every life (default: each seed its own number)"
    )
    parser.add_argument(
        "--forms",
        action=argparse.BooleanOptionalAction,
        help="requests have forms, bans and stops in every life, or in none (default: in half of the seeds)",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="live every seed with 0 to 5 drafts, one by one and planned ahead, in coupled verification, and compare "
        "the answers token for token",
    )
    chosen = parser.parse_args(arguments)
    fixed = {"--drafts": chosen.drafts, "--async-scheduling": chosen.async_scheduling}
    if chosen.compare and (given := [name for name, value in fixed.items() if value is not None]):
        parser.error(f"--compare decides itself about {' and '.join(given)}; leave it out")
    # Tiny pools are the point here; their warnings are not news.
    logger = logging.getLogger("deepinfer")
    level_before = logger.level
    logger.setLevel(logging.ERROR)
    reports: list[LifeReport] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = make_simulated_model(Path(folder) / "model") if chosen.oracle else None
            seeds = range(chosen.seed, chosen.seed + chosen.seeds)
            for seed in tqdm(seeds, desc="living", unit="life", disable=chosen.seeds == 1):
                lived = _live(seed, chosen, model)
                reports += lived
                _tell_problems(lived, chosen)
    except KeyboardInterrupt:
        return 130
    except DeepInferError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        logger.setLevel(level_before)
    _tell_summary(reports)
    return 1 if any(report.problems for report in reports) else 0


def _live(seed: int, chosen: argparse.Namespace, model: Path | None) -> list[LifeReport]:
    if chosen.compare:
        return live_in_worlds(seed, chosen.steps, model, has_forms=chosen.forms)
    choices = {"drafts": chosen.drafts, "async_scheduling": chosen.async_scheduling, "has_forms": chosen.forms}
    return [live(seed, chosen.steps, model, **choices)]


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return whole_number


def _tell_problems(lived: list[LifeReport], chosen: argparse.Namespace) -> None:
    problems = [(report.seed, problem) for report in lived for problem in report.problems]
    for seed, problem in problems:
        sys.stdout.write(f"seed {seed}: {problem}\n")
    if problems:
        words = ["--seed", lived[0].seed, "--steps", chosen.steps]
        words += [word for word in ("--oracle", "--compare") if getattr(chosen, word[2:])]
        for word, choice in (("async-scheduling", chosen.async_scheduling), ("forms", chosen.forms)):
            words += [] if choice is None else [f"--{word}" if choice else f"--no-{word}"]
        if chosen.drafts is not None:
            words += ["--drafts", chosen.drafts]
        sys.stdout.write(f"replay: python -m deepinfer.sim {' '.join(map(str, words))}\n")


def _tell_summary(reports: list[LifeReport]) -> None:
    endings: Counter[str] = Counter()
    for report in reports:
        endings.update(report.endings)
    names = ("steps", "requests", "tokens", "aborts", "forks", "faults", "preemptions")
    counts = ", ".join(f"{sum(getattr(report, name) for report in reports)} {name}" for name in names)
    bad = sum(bool(report.problems) for report in reports)
    lives = "1 life" if len(reports) == 1 else f"{len(reports)} lives"
    virtual_s = sum(report.virtual_s for report in reports)
    sys.stdout.write(f"{lives}: {counts}; {virtual_s:.0f} virtual seconds\n")
    sys.stdout.write("endings: " + ", ".join(f"{count} {reason}" for reason, count in sorted(endings.items())) + "\n")
    sys.stdout.write("nothing went wrong\n" if not bad else f"{bad} of {lives} went wrong\n")


if __name__ == "__main__":
    sys.exit(main())
