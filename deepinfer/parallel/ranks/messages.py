"""Bytes between all ranks of a group: every rank gets the message of every rank, however long each is."""

from __future__ import annotations

import torch

from deepinfer.accelerator import Collectives


def all_gather_bytes(group: Collectives, message: bytes) -> list[bytes]:
    """Return the messages of all ranks, in rank order, by two exchanges: lengths, then messages padded alike."""
    lengths = group.all_gather(torch.tensor([len(message)], dtype=torch.int64)).flatten().tolist()
    longest = max(lengths)
    if not longest:
        return [b""] * group.world_size
    padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = group.all_gather(padded)
    return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths, strict=True)]
