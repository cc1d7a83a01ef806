"""The oracle's arithmetic: what the driver reads from memory and what a history ought to give meet in these functions.

Everything is 64-bit with wrap-around, so no order of computing matters. A list of records is folded as the sum of one
mixed term per record, and the term holds the record's place in the list: swapping two records changes the sum.
NumPy, because a step is many tiny operations and torch takes several times longer to start one.

A row of activations carries three integers in its first channels:

* 0: the token id (of an entry: a hash of its tokens),
* 1: the digest of everything that the row has read so far,
* 2: the position by which the row was rotated, 0 before the rotation and after its inverse.

All three stay below 2**24, so float32 holds them exactly.

Legend: T rows, K selected entries, G n-gram length, k experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

CHANNELS = 3
DIGEST_BITS = 24

_DIGEST_MASK = np.uint64((1 << DIGEST_BITS) - 1)
_DIGEST_SHIFT = np.uint64(64 - DIGEST_BITS)
_SECOND_DIGEST_SHIFT = np.uint64(64 - 2 * DIGEST_BITS)
_HALF = np.uint64(32)
_SIGN_AND_HALF = np.uint64(33)

# Odd numbers from the digits of well-known constants; any odd 63-bit numbers would do.
_FIRST = np.uint64(0x1E3779B97F4A7C15)
_SECOND = np.uint64(0x3F58476D1CE4E5B9)
_ID = np.uint64(0x14D049BB133111EB)
_DIGEST = np.uint64(0x2545F4914F6CDD1D)
_ROTATION = np.uint64(0x369DEA0F31A53F85)
_PLACE = np.uint64(0x5851F42D4C957F2D)
_DAMAGE = np.uint64(0x27BB2EE687B0B0FD)
_STEP = np.uint64(0x106689D45497FDB5)
_WORD_FACTORS = np.array([_ID, _DIGEST, _ROTATION])


class Role(IntEnum):
    """What a hash is for: equal numbers in two roles give unrelated hashes."""

    WINDOW = 1
    ENTRY = 2
    KEY = 3
    QUERY = 4
    PICK = 5
    ATTENTION = 6
    PAIR = 7
    NGRAM = 8
    MEMORY = 9
    ROUTE = 10
    EXPERTS = 11
    TOKEN = 12
    END = 13


_SEEDS = {role: np.uint64(int(role) * int(_STEP)) for role in Role}


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How a digest becomes a token.

    Attributes:
        end_token_id: the end token, which no digest gives unless ``end_one_in`` asks for it.
        end_one_in: one digest in so many gives the end token; 0 for none.
    """

    end_token_id: int = 1
    end_one_in: int = 0


def mix(x: Hashes) -> Hashes:
    """Return a well-mixed number for every number; the high bits are the best ones."""
    x = x * _FIRST
    return (x ^ (x >> _HALF)) * _SECOND


def digest_of(mixed: Hashes) -> Integers:
    """Return the digest bits of a mixed value."""
    return (mixed >> _DIGEST_SHIFT).view(np.int64)


def seed_of(role: Role) -> np.uint64:
    """Return the addend that keeps roles apart."""
    return _SEEDS[role]


def linear_of(words: Integers) -> Hashes:
    """Return one number per triple [..., 3] of id, digest and rotation."""
    linear: Hashes = words.view(np.uint64) @ _WORD_FACTORS
    return linear


def linear_of_parts(ids: Integers, digests: Integers, rotations: Integers) -> Hashes:
    """Return what `linear_of` gives for the same three numbers side by side."""
    linear: Hashes = (
        ids.view(np.uint64) * _ID + digests.view(np.uint64) * _DIGEST + rotations.view(np.uint64) * _ROTATION
    )
    return linear


def term(role: Role, places: Integers, linear: Hashes, damage: Hashes | int = 0) -> Hashes:
    """Return the term of each record of a list.

    Args:
        role: which list.
        places: the logical place of each record: the position or entry number that the reader wanted.
        linear: what the record holds, by `linear_of`.
        damage: how the record differs from a whole one; 0 where it is whole.
    """
    at = places.view(np.uint64) * _PLACE + seed_of(role)
    return mix(linear + at if isinstance(damage, int) else linear + at + damage * _DAMAGE)


def picks_term(entries_TK: Integers) -> Hashes:
    """Return the sum [T] over the picked entries of each row, -1 for none, in any order."""
    mixed_TK = mix(entries_TK.view(np.uint64) * _PLACE + seed_of(Role.PICK))
    total_T: Hashes = (mixed_TK * (entries_TK >= 0)).sum(-1)
    return total_T


def query_of(linear: Hashes) -> Hashes:
    """Return the hash with which a row asks for entries."""
    return mix(linear + seed_of(Role.QUERY))


def score_of(query: Hashes, key: Hashes) -> Integers:
    """Return the score of keys for queries, of either sign with equal chance."""
    return mix(query ^ key).view(np.int64)


def attended(
    row: Hashes, positions: Integers, window_sum: Hashes, entry_sum: Hashes | None, picks_sum: Hashes | None
) -> Integers:
    """Return the digest of a row after attention.

    Args:
        row: what the query carries, by `linear_of`.
        positions: position of the row.
        window_sum: sum of the terms of its window.
        entry_sum: sum of the terms of every entry that it may see; None without long range.
        picks_sum: `picks_term` of its picks; None without long range.
    """
    read = row + positions.view(np.uint64) * _PLACE + window_sum * _FIRST + seed_of(Role.ATTENTION)
    if entry_sum is not None and picks_sum is not None:
        read = read + entry_sum * _SECOND + picks_sum * _DAMAGE
    return digest_of(mix(read))


@dataclass(frozen=True, slots=True)
class PairHash:
    """The two channels of a pooled pair."""

    ids: Integers
    digests: Integers


def pair_of(before: Hashes, own: Hashes) -> PairHash:
    """Return the entry of two neighbouring rows, each given by `pending_linear`."""
    mixed = mix(before * _PLACE + own + seed_of(Role.PAIR))
    return PairHash(digest_of(mixed), ((mixed >> _SECOND_DIGEST_SHIFT) & _DIGEST_MASK).view(np.int64))


def pending_linear(gate: Hashes, latent: Hashes) -> Hashes:
    """Return one number for the gate half and the latent half of a row, both by `linear_of`."""
    return gate + latent * _STEP


def ngram_of(tokens_TG: Integers, pad_id: int) -> Integers:
    """Return the hash [T] of each row's look-back; -1 blocks itself and everything further back."""
    open_TG = np.logical_and.accumulate(tokens_TG >= 0, axis=1)
    places_G = np.arange(tokens_TG.shape[1]).view(np.uint64)
    seen_TG = np.where(open_TG, tokens_TG, pad_id).view(np.uint64)
    return digest_of(mix(seen_TG * _ID + places_G * _PLACE + seed_of(Role.NGRAM)).sum(1))


def remembered(digests: Integers, memory: Integers) -> Integers:
    """Return the digest of a row after the Engram rows that it looked up."""
    return digest_of(mix(digests.view(np.uint64) * _DIGEST + memory.view(np.uint64) * _ID + seed_of(Role.MEMORY)))


def first_expert(linear: Hashes, images: Flags, experts: int) -> Integers:
    """Return the first expert of each row; its others follow, modulo the number of experts."""
    return digest_of(mix(linear + images * _PLACE + seed_of(Role.ROUTE))) % experts


def combined(digests: Integers, slots_Tk: Integers) -> Integers:
    """Return the digest of a row after its experts, in their order."""
    places_k = np.arange(slots_Tk.shape[1]).view(np.uint64)
    slot_sum = mix(slots_Tk.view(np.uint64) * _ID + places_k * _PLACE + seed_of(Role.EXPERTS)).sum(1)
    return digest_of(mix(digests.view(np.uint64) * _DIGEST + slot_sum))


def token_of(ids: Integers, digests: Integers, vocab_size: int, rule: TokenRule) -> Integers:
    """Return the token that follows a row."""
    mixed = mix(ids.view(np.uint64) * _ID + digests.view(np.uint64) * _DIGEST + seed_of(Role.TOKEN))
    drawn = (mixed >> _SIGN_AND_HALF).view(np.int64)
    if not 0 <= rule.end_token_id < vocab_size:
        return drawn % vocab_size
    tokens = drawn % max(vocab_size - 1, 1)
    tokens = tokens + (tokens >= rule.end_token_id)
    if rule.end_one_in == 0:
        return tokens
    chance = (mix(mixed + seed_of(Role.END)) >> _SIGN_AND_HALF).view(np.int64)
    return np.where(chance % rule.end_one_in == 0, rule.end_token_id, tokens)
