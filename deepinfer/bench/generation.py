"""Batches of requests through a whole engine: step by step, with the time of each step and of each token."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from deepinfer.bench.report import Clock, counts_below
from deepinfer.engine.engine import Engine
from deepinfer.engine.outputs import RequestOutput
from deepinfer.errors import ArgumentError
from deepinfer.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationSettings:
    """What to run.

    Attributes:
        batch_sizes: requests that are sent at once, a case each.
        prompt_tokens: length of the random prompts; the longest length where prompts were given.
        output_tokens: tokens that each request makes.
        repeats: timed runs per case, after one of the largest batch that is not.
        seed: changes random prompts.
        has_given_prompts: whether prompts were given.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 256
    output_tokens: int = 32
    repeats: int = 3
    seed: int = 0
    has_given_prompts: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be run, all at once."""
        problems = counts_below(1, batch_sizes=self.batch_sizes, prompt_tokens=self.prompt_tokens, repeats=self.repeats)
        # The first token comes out of the prompt's step; without a second one no decode step would run.
        problems += counts_below(2, output_tokens=self.output_tokens) + counts_below(0, seed=self.seed)
        if problems:
            raise ArgumentError("bench", problems)

    @property
    def all_runs(self) -> int:
        """Runs of all cases, the untimed one included."""
        return len(self.batch_sizes) * self.repeats + 1


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step of the engine.

    Attributes:
        kind: what it ran.
        seconds: how long it took.
        positions: query positions that it computed.
        tokens: tokens that it emitted.
        host_s: the host's own work in it.
        device_s: what the device worked for the steps that were read in it; None where the driver does not measure.
        requests: requests that took part.
    """

    kind: Literal["prefill", "decode", "empty"]
    seconds: float
    positions: int
    tokens: int
    host_s: float = 0.0
    device_s: float | None = None
    requests: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether its time is a decode step's; planned ahead, the last one is read where nothing else runs."""
        return self.kind == "decode" or (self.kind == "empty" and self.tokens > 0)


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One batch, from its submission to its last token.

    Attributes:
        seconds: the whole run.
        steps: its steps.
        token_times: for each request, seconds from the submission to each of its tokens.
    """

    seconds: float
    steps: tuple[StepTime, ...]
    token_times: tuple[tuple[float, ...], ...]

    @property
    def batch_size(self) -> int:
        """Requests of the batch."""
        return len(self.token_times)


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return prompts of ordinary token ids, the same for the same seed."""
    generator = random.Random(seed)
    # In every configuration that ships the lowest ids mean begin, end and padding, the highest two images and drafts.
    lowest = min(3, vocabulary - 1)
    stop = max(lowest + 1, vocabulary - 2)
    return [[generator.randrange(lowest, stop) for _ in range(length)] for _ in range(count)]


def request_name(number: int) -> str:
    """Return the id under which a prompt of a batch is sent."""
    return f"bench-{number}"


def run_batch(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    clock: Clock = time.perf_counter,
    forced: Sequence[Sequence[int]] = (),
) -> BatchRun:
    """Send all prompts at once and run the engine dry; every request makes ``output_tokens``, greedily.

    Args:
        engine: runs them.
        prompts: token ids.
        output_tokens: tokens that each request makes.
        clock: seconds.
        forced: the tokens of each request, which it makes whatever its logits say; none means that it chooses.

    Raises:
        ArgumentError: with the reason of each request that did not make them.
    """
    params = [
        SamplingParams(
            temperature=0,
            max_tokens=output_tokens,
            ignore_eos=True,
            seed=0,
            golden_token_ids=tuple(forced[number]) if forced else None,
        )
        for number in range(len(prompts))
    ]
    token_times: dict[str, list[float]] = {request_name(number): [] for number in range(len(prompts))}
    steps: list[StepTime] = []
    problems: list[str] = []
    begun = clock()
    for request_id, prompt, each in zip(token_times, prompts, params, strict=True):
        engine.add_request(request_id, prompt, each)
    while engine.has_unfinished_requests():
        before, spent = clock(), engine.times
        records = engine.step()
        now = clock()
        tokens = 0
        for record in records:
            times = token_times[record.request_id]
            # With drafts a step may give a request several.
            new = len(record.outputs[0].token_ids) - len(times)
            times += [now - begun] * new
            tokens += new
        rows = engine.last_step.rows
        positions = sum(row.q for row in rows)
        host_s, device_s = engine.times.since(spent)
        steps.append(StepTime(engine.last_step.kind, now - before, positions, tokens, host_s, device_s, len(rows)))
        problems += _problems(records)
    if problems:
        raise ArgumentError("bench", problems)
    return BatchRun(clock() - begun, tuple(steps), tuple(map(tuple, token_times.values())))


def _problems(records: Sequence[RequestOutput]) -> list[str]:
    return [
        f"{record.request_id} ended as {record.outputs[0].finish_reason!r}: {record.outputs[0].message}"
        for record in records
        if record.finished and record.outputs[0].finish_reason != "length"
    ]
