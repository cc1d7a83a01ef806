"""Random streams and seeds: which draw of which request uses which random number (engine.md section 6).

A random number is a pure function of (seed, stream). The stream names the token that is being made and what the
number decides, never a step, a batch row or a draft count, so that no scheduling can change a token.
"""

from __future__ import annotations

import random
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_SEED_BITS = 63
_WORD = 2**64
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15

ORIGINAL_ROW_STEP = 10_000_019
"""In the original's keying, row j of a verification uses the step's first position plus j times this."""

ORIGINAL_DRAFT_SEED_OFFSET = 1_000_000_007
"""In the original's keying, drafts draw at the true position with the seed plus this."""


class Keying(IntEnum):
    """How streams are numbered; the value is how many streams a token index owns."""

    ORIGINAL = 3
    """The original engine's, for its published vectors: step cuts change its tokens."""
    INDEX = 4
    """Ours: by the true index of the token and by nothing else."""


class DrawCase(IntEnum):
    """What a random number decides about the token at its index."""

    FRESH = 0
    RESAMPLE = 1
    ACCEPT = 2
    DRAFT = 3


def stream(index: int, case: DrawCase = DrawCase.FRESH) -> int:
    """Return the stream of a draw: ``4 * index + case``.

    Args:
        index: index of the token being made, in the request's whole history: prompt length + outputs so far.
        case: what is being decided.
    """
    return Keying.INDEX * index + case


def streams(
    indices: NDArray[np.int64], case: DrawCase = DrawCase.FRESH, keying: Keying = Keying.INDEX
) -> NDArray[np.int64]:
    """Return the streams of many draws of one case."""
    return indices * int(keying) + int(case)


def original_stream(position: int, case: DrawCase = DrawCase.FRESH) -> int:
    """Return the stream of the original engine's keying, ``3 * position + case``, for its published vectors.

    Args:
        position: its position: ``seqlen_k`` for a prefill row, ``seqlen_k - seqlen_q + 1`` for the first row of a
            decode step, plus :data:`ORIGINAL_ROW_STEP` for each further row.
        case: fresh, resample or accept; drafts have no case there but another seed.

    Raises:
        ValueError: for the draft case.
    """
    if case == DrawCase.DRAFT:
        raise ValueError(
            "the original keying has no stream for drafts: use case FRESH with the seed plus ORIGINAL_DRAFT_SEED_OFFSET"
        )
    return Keying.ORIGINAL * position + case


def sibling_seed(seed: int, sibling: int) -> int:
    """Return the seed of answer ``sibling`` of a request with ``n > 1``.

    Answer 0 keeps the request's seed, so it equals the answer of ``n = 1``. Answer i > 0 gets the upper 63 bits of
    the SplitMix64 output at state ``seed + i * 0x9E3779B97F4A7C15`` (modulo 2**64), which has nothing in common with
    the neighbouring seeds that users like to choose.
    """
    return seed if sibling == 0 else _mix((seed + sibling * _GOLDEN_GAMMA) % _WORD) >> 1


def random_seed(generator: random.Random) -> int:
    """Return a seed for a request that gave none: 63 bits of the engine's own generator."""
    return generator.getrandbits(_SEED_BITS)


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % _WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % _WORD
    return state ^ (state >> 31)
