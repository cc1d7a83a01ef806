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
    chosen = parser.parse_args(arguments)
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
                report = live(seed, chosen.steps, model, drafts=chosen.drafts, async_scheduling=chosen.async_scheduling)
                reports.append(report)
                _tell_problems(report, chosen)
    except KeyboardInterrupt:
        return 130
    except DeepInferError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    finally:
        logger.setLevel(level_before)
    _tell_summary(reports)
    return 1 if any(report.problems for report in reports) else 0


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is below {least}")
        return value

    return whole_number


def _tell_problems(report: LifeReport, chosen: argparse.Namespace) -> None:
    for problem in report.problems:
        sys.stdout.write(f"seed {report.seed}: {problem}\n")
    if report.problems:
        words = ["--seed", report.seed, "--steps", chosen.steps, *(["--oracle"] if chosen.oracle else [])]
        if chosen.async_scheduling is not None:
            words.append("--async-scheduling" if chosen.async_scheduling else "--no-async-scheduling")
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
