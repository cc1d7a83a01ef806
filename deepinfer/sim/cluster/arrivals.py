"""When requests arrive and how long they are: drawn, or read from a trace."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from deepinfer.errors import ArgumentError


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """One request.

    Attributes:
        at_ms: when it arrives.
        prompt_tokens: length of its prompt.
        output_tokens: tokens that it will make.
    """

    at_ms: float
    prompt_tokens: int
    output_tokens: int

    def problems(self) -> list[str]:
        """Return what is impossible about it."""
        problems = [f"at_ms {self.at_ms}"] if not (math.isfinite(self.at_ms) and self.at_ms >= 0) else []
        problems += [f"prompt_tokens {self.prompt_tokens}"] * (self.prompt_tokens < 1)
        return problems + [f"output_tokens {self.output_tokens}"] * (self.output_tokens < 1)


def drawn_arrivals(
    requests: int, *, per_second: float, prompt_tokens: int, output_tokens: int, seed: int
) -> tuple[Arrival, ...]:
    """Draw a Poisson stream whose lengths are exponential around their means; rate 0 sends all at once."""
    draw = random.Random(f"arrivals {seed}")
    now = 0.0
    arrivals = []
    for _ in range(requests):
        now += draw.expovariate(per_second) * 1e3 if per_second > 0 else 0.0
        prompt, output = (
            max(1, round(draw.expovariate(1 / mean))) if mean > 1 else 1 for mean in (prompt_tokens, output_tokens)
        )
        arrivals.append(Arrival(now, prompt, output))
    return tuple(arrivals)


def read_trace(file: Path) -> tuple[Arrival, ...]:
    """Read one ``{"at_ms": ..., "prompt_tokens": ..., "output_tokens": ...}`` a line, in any order.

    Raises ArgumentError with every line that is none.
    """
    arrivals, problems = [], []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
            arrival = Arrival(float(values["at_ms"]), int(values["prompt_tokens"]), int(values["output_tokens"]))
        except (ValueError, KeyError, TypeError):
            problems.append(f'line {number}: write {{"at_ms": 0, "prompt_tokens": 100, "output_tokens": 10}}')
            continue
        problems += [f"line {number}: {problem}" for problem in arrival.problems()]
        arrivals.append(arrival)
    if not arrivals and not problems:
        problems.append("no request in it")
    if problems:
        raise ArgumentError(str(file), problems)
    return tuple(sorted(arrivals))
