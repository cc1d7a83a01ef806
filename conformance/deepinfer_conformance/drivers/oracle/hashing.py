"""The oracle's arithmetic: what the driver reads from memory and what a history ought to give meet in these functions.

Everything is int64 with wrap-around, so no order of computing matters. A list of records is folded as the sum of one
mixed term per record, and the term holds the record's place in the list: swapping two records changes the sum.

A row of activations carries three integers in its first channels:

* 0: the token id (of an entry: a hash of its tokens),
* 1: the digest of everything that the row has read so far,
* 2: the position by which the row was rotated, 0 before the rotation and after its inverse.

All three stay below 2**24, so float32 holds them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

CHANNELS = 3
DIGEST_BITS = 24

_DIGEST_MASK = (1 << DIGEST_BITS) - 1
_DIGEST_SHIFT = 64 - DIGEST_BITS
_SECOND_DIGEST_SHIFT = 64 - 2 * DIGEST_BITS
_LOW_WORD = 0xFFFFFFFF

# Odd numbers from the binary digits of well-known irrational numbers; any odd 63-bit numbers would do.
_FIRST = 0x1E3779B97F4A7C15
_SECOND = 0x3F58476D1CE4E5B9
_ID = 0x14D049BB133111EB
_DIGEST = 0x2545F4914F6CDD1D
_ROTATION = 0x369DEA0F31A53F85
_PLACE = 0x5851F42D4C957F2D
_DAMAGE = 0x27BB2EE687B0B0FD
_STEP = 0x106689D45497FDB5
_WORD_FACTORS = torch.tensor([_ID, _DIGEST, _ROTATION])


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


@dataclass(frozen=True, slots=True)
class TokenRule:
    """How a digest becomes a token.

    Attributes:
        end_token_id: the end token, which no digest gives unless ``end_one_in`` asks for it.
        end_one_in: one digest in so many gives the end token; 0 for none.
    """

    end_token_id: int = 1
    end_one_in: int = 0


def mix(x: torch.Tensor) -> torch.Tensor:
    """Return a well-mixed int64 for every int64; the high bits are the best ones."""
    x = x * _FIRST
    return (x ^ ((x >> 32) & _LOW_WORD)) * _SECOND


def digest_of(mixed: torch.Tensor) -> torch.Tensor:
    """Return the digest bits of a mixed value."""
    return (mixed >> _DIGEST_SHIFT) & _DIGEST_MASK


def seed_of(role: Role) -> int:
    """Return the addend that keeps roles apart."""
    return int(role) * _STEP


def linear_of(words: torch.Tensor) -> torch.Tensor:
    """Return one int64 per triple [..., 3] of id, digest and rotation."""
    return (words * _WORD_FACTORS).sum(-1)


def linear_of_parts(ids: torch.Tensor, digests: torch.Tensor, rotations: torch.Tensor) -> torch.Tensor:
    """Return what `linear_of` gives for the same three numbers side by side."""
    return ids * _ID + digests * _DIGEST + rotations * _ROTATION


def term(role: Role, places: torch.Tensor, linear: torch.Tensor, damage: torch.Tensor | int = 0) -> torch.Tensor:
    """Return the term of each record of a list.

    Args:
        role: which list.
        places: the logical place of each record: the position or entry number that the reader wanted.
        linear: what the record holds, by `linear_of`.
        damage: how the record differs from a whole one; 0 where it is whole.
    """
    return mix(linear + places * _PLACE + damage * _DAMAGE + seed_of(role))


def picks_term(entries: torch.Tensor) -> torch.Tensor:
    """Return the sum [T] over the picked entries of each row [T, K], -1 for none, in any order."""
    return torch.where(entries >= 0, mix(entries * _PLACE + seed_of(Role.PICK)), 0).sum(-1)


def query_of(linear: torch.Tensor) -> torch.Tensor:
    """Return the hash with which a row asks for entries."""
    return mix(linear + seed_of(Role.QUERY))


def score_of(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return the score of keys for queries, of either sign with equal chance."""
    return mix(query ^ key)


def attended(
    row: torch.Tensor,
    positions: torch.Tensor,
    window_sum: torch.Tensor,
    entry_sum: torch.Tensor | int,
    picks_sum: torch.Tensor | int,
) -> torch.Tensor:
    """Return the digest of a row after attention.

    Args:
        row: what the query carries, by `linear_of`.
        positions: position of the row.
        window_sum: sum of the terms of its window.
        entry_sum: sum of the terms of every entry that it may see; 0 without long range.
        picks_sum: `picks_term` of its picks; 0 without long range.
    """
    read = window_sum * _FIRST + entry_sum * _SECOND + picks_sum * _DAMAGE
    return digest_of(mix(row + positions * _PLACE + read + seed_of(Role.ATTENTION)))


@dataclass(frozen=True, slots=True)
class PairHash:
    """The two channels of a pooled pair."""

    ids: torch.Tensor
    digests: torch.Tensor


def pair_of(before: torch.Tensor, own: torch.Tensor) -> PairHash:
    """Return the entry of two neighbouring rows, each given by `pending_linear`."""
    mixed = mix(before * _PLACE + own + seed_of(Role.PAIR))
    return PairHash(digest_of(mixed), (mixed >> _SECOND_DIGEST_SHIFT) & _DIGEST_MASK)


def pending_linear(gate: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
    """Return one int64 for the gate half and the latent half of a row, both by `linear_of`."""
    return gate + latent * _STEP


def ngram_of(tokens_TG: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Return the hash [T] of each row's look-back; -1 blocks itself and everything further back."""
    open_TG = (tokens_TG >= 0).to(torch.int64).cumprod(1) > 0
    places_G = torch.arange(tokens_TG.shape[1])
    seen_TG = torch.where(open_TG, tokens_TG, pad_id)
    return digest_of(mix(seen_TG * _ID + places_G * _PLACE + seed_of(Role.NGRAM)).sum(1))


def remembered(digests: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return the digest of a row after the Engram rows that it looked up."""
    return digest_of(mix(digests * _DIGEST + memory * _ID + seed_of(Role.MEMORY)))


def first_expert(linear: torch.Tensor, image: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the first expert of each row; its others follow, modulo the number of experts."""
    mixed = mix(linear + image.to(torch.int64) * _PLACE + seed_of(Role.ROUTE))
    return digest_of(mixed) % experts


def combined(digests: torch.Tensor, slots_Tk: torch.Tensor) -> torch.Tensor:
    """Return the digest of a row after its experts, in their order."""
    places_k = torch.arange(slots_Tk.shape[1])
    slot_sum = mix(slots_Tk * _ID + places_k * _PLACE + seed_of(Role.EXPERTS)).sum(1)
    return digest_of(mix(digests * _DIGEST + slot_sum))


def token_of(ids: torch.Tensor, digests: torch.Tensor, vocab_size: int, rule: TokenRule) -> torch.Tensor:
    """Return the token that follows a row."""
    mixed = mix(ids * _ID + digests * _DIGEST + seed_of(Role.TOKEN))
    drawn = (mixed >> 33) & (_LOW_WORD >> 1)
    if not 0 <= rule.end_token_id < vocab_size:
        return drawn % vocab_size
    tokens = drawn % max(vocab_size - 1, 1)
    tokens = tokens + (tokens >= rule.end_token_id).to(torch.int64)
    if rule.end_one_in == 0:
        return tokens
    ends = ((mix(mixed + seed_of(Role.END)) >> 33) & (_LOW_WORD >> 1)) % rule.end_one_in == 0
    return torch.where(ends, rule.end_token_id, tokens)
