"""Trains the small model that ships with the package, from one seed, on the CPU.

Run from the root of the repository; a folder that holds an unfinished run is taken up where it was saved:

    python -m tools.small_model.train --minutes 80 --folder build/small

The folder then holds ``checkpoint`` (the released form, with its tokenizer), ``made.json`` (hashes, plan, skills),
``loss.csv`` and the plot. To make the same checkpoint again: ``--plan made.json`` and the same processes and threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from .configuration import small_configuration
from .make_tokenizer import make_tokenizer
from .schedule import Plan
from .team import Team
from .trainer import PHASES, Settings, Trainer

_DEFAULT_MINUTES = 80.0


def main() -> None:
    """Read the options, then train here or in a process of its own."""
    arguments = _parser().parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.detach:
        _detach(arguments.folder)
        return
    meeting = arguments.folder / "meeting"
    others: list[subprocess.Popen[bytes]] = []
    if arguments.rank == 0:
        meeting.unlink(missing_ok=True)
        others = [_start([*sys.argv[1:], "--rank", str(rank)]) for rank in range(1, arguments.processes)]
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(mode=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    tokenizer = make_tokenizer()
    plans = _plans(arguments)
    settings = Settings(
        seed=arguments.seed,
        rate=arguments.rate,
        minutes=None if plans else arguments.minutes,
        save_seconds=arguments.save_minutes * 60.0,
        skill_items=arguments.skill_items,
    )
    team = Team.join(arguments.rank, arguments.processes, meeting)
    made = Trainer(arguments.folder, settings, tokenizer, small_configuration(tokenizer), plans, team).run()
    team.leave()
    if made is not None:
        sys.stdout.write(json.dumps(made, indent=1) + "\n")
    for other in others:
        other.wait()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the run lives; may hold an unfinished one")
    parser.add_argument("--minutes", type=float, default=_DEFAULT_MINUTES, help="time to fill, default 80")
    parser.add_argument("--steps", type=int, help="instead of minutes: this many steps, and an eighth of it for drafts")
    parser.add_argument("--plan", type=Path, help="instead of minutes: the made.json of a run to repeat")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of weights and sequences, default 41")
    parser.add_argument("--rate", type=float, default=Settings.rate, help="peak learning rate, default 0.003")
    parser.add_argument("--threads", type=int, default=1, help="threads of a process, default 1")
    parser.add_argument("--processes", type=int, default=2, help="processes that train together, default 2")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--save-minutes", type=float, default=5.0, help="how often to save, default 5")
    parser.add_argument("--skill-items", type=int, default=Settings.skill_items, help="test items a row, default 24")
    parser.add_argument(
        "--detach", action="store_true", help="train in the background; log.txt in the folder follows it"
    )
    return parser


def _plans(arguments: argparse.Namespace) -> dict[str, Plan] | None:
    if arguments.plan is not None:
        held = json.loads(arguments.plan.read_text(encoding="utf-8"))["plans"]
        return {phase: Plan([tuple(knot) for knot in held[phase]]) for phase in PHASES}
    if arguments.steps is not None:
        return {"model": Plan([(0, 0.0, arguments.steps)]), "drafts": Plan([(0, 0.0, max(1, arguments.steps // 8))])}
    return None


def _detach(folder: Path) -> None:
    """Start the same command in a session of its own, so that it outlives this one's terminal."""
    with (folder / "log.txt").open("ab") as log:
        process = _start(
            [word for word in sys.argv[1:] if word != "--detach"], stdout=log, stderr=log, start_new_session=True
        )
    sys.stdout.write(f"training as process {process.pid}; follow it in {folder / 'log.txt'}\n")


def _start(words: list[str], **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tools.small_model.train", *words]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)  # noqa: S603 - our own command


if __name__ == "__main__":
    main()
