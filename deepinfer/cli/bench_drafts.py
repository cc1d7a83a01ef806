"""The comparison of numbers of drafts, `deepinfer bench latency --drafts`: what is read and what is printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from deepinfer.cli import show
from deepinfer.cli.bench_shared import threads_text

if TYPE_CHECKING:
    from deepinfer.bench.drafts import DraftsResult, DraftsSettings


def heading(settings: DraftsSettings, given_prompts: int, threads: int) -> str:
    """Say what was compared and what is set in it."""
    generation = settings.generation
    if settings.acceptance is None:
        rightness, origin = "drafts and answers are its own", "greedy"
    else:
        rightness, origin = f"{settings.acceptance:.0%} of the drafts are right by script", "set"
    prompts = f"{given_prompts} given prompts" if given_prompts else f"prompts of {generation.prompt_tokens} tokens"
    runs = "rounds in which all cases run" if settings.alternates else "runs"
    return (
        f"{settings.model}: {rightness}, {prompts}, {generation.output_tokens} output tokens that are {origin}, median "
        f"of {generation.repeats} {runs}, {settings.clock} time, {threads_text(threads)}"
    )


def table(settings: DraftsSettings, results: Sequence[DraftsResult]) -> str:
    """Return the table; rates are also given as a multiple of that without drafts, where it was measured.

    Where cases alternate, the multiple is the median of those of the rounds.
    """
    base = settings.base_drafts if settings.alternates else 0
    header = (
        "batch",
        "drafts",
        "decode tok/s",
        f"of {base} draft{'s' * (base != 1)}",
        "step ms",
        "tokens/step",
        "rows/step",
        "accepted by place",
    )
    plain = {result.batch_size: result.decode_tokens_per_s for result in results if result.drafts == 0}
    rows = [
        (
            str(result.batch_size),
            f"to {result.drafts}" if result.is_variable else str(result.drafts),
            f"{result.decode_tokens_per_s:,.1f}",
            _multiple(result, plain.get(result.batch_size)),
            f"{result.decode_step_ms:,.1f}",
            f"{result.tokens_per_step:.2f}",
            f"{result.rows_per_step:.2f}",
            " ".join(f"{share:.2f}" for share in result.accepted_by_place) or "-",
        )
        for result in results
    ]
    return show.table(header, rows)


def _multiple(result: DraftsResult, plain: float | None) -> str:
    if result.of_base is not None:
        return f"{result.of_base:.2f}"
    return "-" if plain is None else f"{result.decode_tokens_per_s / plain:.2f}"


def numbers(option: str, text: str, problems: list[str]) -> tuple[int, ...]:
    """Return the numbers of ``"0,2,5"`` or ``"0..5"``."""
    first, dots, last = text.partition("..")
    if dots and first.strip().isdigit() and last.strip().isdigit() and int(first) <= int(last):
        return tuple(range(int(first), int(last) + 1))
    words = [word.strip() for word in text.split(",")]
    if all(word.isascii() and word.isdigit() for word in words):
        return tuple(dict.fromkeys(map(int, words)))
    problems.append(f"{option} {text!r}: write whole numbers parted by commas, or the first and last as 0..5")
    return (0,)
