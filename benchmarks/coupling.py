"""How often drafts are accepted: rejection sampling against ways of coupling, over pairs of distributions.

``python benchmarks/coupling.py [--pairs N] [--vocabulary V] [--seed S]`` prints the table of docs/drafts.md.

A pair is a target p (a power law over shuffled ids, with noise in the logits) and a draft q (the target's logits with
more noise). For each pair every way's chance of acceptance is computed exactly, or over a grid of uniforms:

* rejection: 1 - d, d the total-variation distance; the best that any way can do;
* same u: target and draft invert their cumulative sums in id order with one uniform (``drafting.guess`` with reach 0);
* reach r: ``drafting.guess`` with that reach;
* independent: the draft draws with a number of its own, Gumbel noise for example, and the target by u;
* Gumbel twice: both take the largest of logit + the same Gumbel noise. The target's plain draw would have to be that
  one: shown to say what the definition of the draw costs, with its lower bound (1 - d) / (1 + d).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

REACHES = (0.02, 0.05, 0.1, 0.2, 0.4)
GRID = (np.arange(512) + 0.5) / 512
GUMBEL_DRAWS = 48


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of pair.

    Attributes:
        label: for the table.
        exponent: of the power law: larger means fewer likely tokens.
        noise: deviation of the draft's logits from the target's.
        top_p: nucleus that both apply.
    """

    label: str
    exponent: float
    noise: float
    top_p: float = 1.0


KINDS = (
    *(
        Kind(f"{shape}, {draft} draft", exponent, noise)
        for shape, exponent in (("flat", 1.1), ("usual", 1.5), ("sharp", 2.5))
        for draft, noise in (("close", 0.2), ("fair", 0.5), ("poor", 1.0))
    ),
    Kind("usual, fair draft, top-p 0.9", 1.5, 0.5, 0.9),
    Kind("usual, fair draft, top-p 0.5", 1.5, 0.5, 0.5),
)


def pairs(kind: Kind, count: int, vocabulary: int, generator: np.random.Generator) -> Iterator[tuple[Vector, Vector]]:
    """Yield targets and their drafts."""
    for _ in range(count):
        logits = -kind.exponent * np.log(np.arange(1, vocabulary + 1)) + generator.normal(0, 0.5, vocabulary)
        target = logits[generator.permutation(vocabulary)]
        draft = target + generator.normal(0, kind.noise, vocabulary)
        yield nucleus(target, kind.top_p), nucleus(draft, kind.top_p)


def nucleus(logits: Vector, top_p: float) -> Vector:
    """Return the softmax over the shortest prefix, best first, whose mass exceeds ``top_p``."""
    mass = np.exp(logits - logits.max())
    mass /= mass.sum()
    if top_p < 1:
        order = np.argsort(-mass, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        mass[order[before > top_p]] = 0
        mass /= mass.sum()
    return mass


def guesses(draft: Vector, reach: float) -> NDArray[np.int64]:
    """Return the guess at each uniform of the grid (``drafting.guess`` in floating point)."""
    ends = np.cumsum(draft)
    found = np.empty(len(GRID), np.int64)
    for place, (u, spread) in enumerate(zip(GRID, reach * np.sqrt(GRID * (1 - GRID)), strict=True)):
        low = max(0, int(np.searchsorted(ends, u - spread)))
        high = min(len(draft), int(np.searchsorted(ends, u + spread)) + 1)
        inside = slice(low, high)
        shared = np.minimum(ends[inside], u + spread) - np.maximum(ends[inside] - draft[inside], u - spread)
        found[place] = low + int(np.argmax(np.where(draft[inside] > 0, shared, -1)))
    return found


def acceptance(target: Vector, draft: Vector, generator: np.random.Generator) -> dict[str, float]:
    """Return each way's chance of acceptance for one pair."""
    together = float(np.minimum(target, draft).sum())
    ends, draft_ends = np.cumsum(target), np.cumsum(draft)
    overlap = np.minimum(ends, draft_ends) - np.maximum(ends - target, draft_ends - draft)
    drawn = np.minimum(np.searchsorted(ends, GRID, side="right"), len(target) - 1)
    noise = -np.log(-np.log(generator.random((GUMBEL_DRAWS, len(target)))))
    with np.errstate(divide="ignore"):
        agree = (np.log(target) + noise).argmax(1) == (np.log(draft) + noise).argmax(1)
    return {
        "rejection": together,
        "same u": float(np.maximum(overlap, 0).sum()),
        **{f"reach {reach:g}": float((guesses(draft, reach) == drawn).mean()) for reach in REACHES},
        "best token": float(target[draft.argmax()]),
        "independent": float((target * draft).sum()),
        "Gumbel twice": float(agree.mean()),
        "its bound": together / (2 - together),
    }


def main() -> None:
    """Print one line of Markdown per kind of pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, help="pairs of each kind")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = np.random.default_rng(arguments.seed)
    for number, kind in enumerate(KINDS):
        rows = [
            acceptance(target, draft, generator)
            for target, draft in pairs(kind, arguments.pairs, arguments.vocabulary, generator)
        ]
        names = list(rows[0])
        if number == 0:
            print("| pairs | " + " | ".join(names) + " |")  # noqa: T201 - the output of a script
            print("| --- |" + " --- |" * len(names))  # noqa: T201
        means = (float(np.mean([row[name] for row in rows])) for name in names)
        print(f"| {kind.label} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
