"""Made-up decode steps for a time when no request lives: recording, trying and timing need something to run.

Their requests use state slots and blocks that may be owned later, each its own, so that no two rows write to one place.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.upload import on_device
from deepinfer.cache.blocks import blocks_for
from deepinfer.cache.pools import CachePools
from deepinfer.engine.graphs.buffers import StepExtents
from deepinfer.engine.graphs.decode_steps import DecodeInputs, DecodeSteps
from deepinfer.engine.step_inputs import StepInputs

_LONGEST_CONTEXT = 64


class TrialSteps:
    """Makes steps of any size; an instance is the ``trial`` of :meth:`DecodeSteps.record`."""

    def __init__(
        self, steps: DecodeSteps, pools: CachePools, ops: Ops, extents: StepExtents, *, vocab_size: int
    ) -> None:
        """Take the caches, whose owners are still to come.

        Args:
            steps: prepares the inputs.
            pools: the caches.
            ops: the plan's ops.
            extents: what bounds the steps.
            vocab_size: ids are below it.
        """
        self._steps = steps
        self._pools = pools
        self._ops = ops
        self._extents = extents
        self._vocab_size = vocab_size

    def __call__(self, rows: int, number: int) -> DecodeInputs:
        """Return a step of so many rows; its caches begin with zeros.

        Where the pools have no place for that many requests, the rest of the rows is not valid.
        """
        extents, device = self._extents, self._pools.block_bytes_Nb.device
        draws = np.random.Generator(np.random.PCG64([rows, number]))
        per_request = extents.rows_per_request
        room = max(1, min(extents.max_position, extents.table_blocks * extents.block_size))
        most_cached = max(0, min(_LONGEST_CONTEXT, room - per_request))
        num_blocks = blocks_for(min(room, most_cached + per_request), extents.block_size)
        owners = min(self._pools.num_slots - 1, (self._pools.num_blocks - 1) // num_blocks)
        q_R = _rows_of_requests(rows, min(per_request, room))
        requests = len(q_R)
        is_owner_R = np.arange(requests) < owners
        cached_R = np.where(is_owner_R, draws.integers(0, most_cached + 1, requests), 0)
        slot_R = np.where(is_owner_R, np.arange(1, requests + 1), 0)
        table_RB = np.where(is_owner_R[:, None], 1 + np.arange(requests * num_blocks).reshape(requests, -1), 0)
        starts_R1 = np.concatenate(([0], np.cumsum(q_R)))
        request_T = np.repeat(np.arange(requests), q_R)
        position_T = np.arange(rows) - (starts_R1[:-1] - cached_R)[request_T]

        def moved(values: NDArray[np.integer] | NDArray[np.bool_]) -> torch.Tensor:
            dtype = np.bool_ if values.dtype == np.bool_ else np.int64
            return on_device(values.astype(dtype), device)

        self._clear(moved(slot_R[is_owner_R]), moved(table_RB[is_owner_R].ravel()))
        layout = StepLayout(
            kind="decode",
            block_size=extents.block_size,
            ring=extents.ring,
            row_starts_R1=moved(starts_R1),
            cached_R=moved(cached_R),
            state_slots_R=moved(slot_R),
            block_table_RB=moved(table_RB),
            request_T=moved(request_T),
            position_T=moved(position_T),
            window_start_R=torch.zeros(requests, dtype=torch.int64, device=device),
            image_T=torch.zeros(rows, dtype=torch.bool, device=device),
            valid_T=moved(is_owner_R[request_T]),
            max_position=int((cached_R + q_R).max()),
            max_rows=int(q_R.max()),
        )
        ids_T = moved(draws.integers(0, self._vocab_size, rows))
        history_RG = moved(draws.integers(0, self._vocab_size, (requests, extents.look_back - 1)))
        return self._steps.prepare(StepInputs(ids_T, history_RG, layout, layout.row_starts_R1[1:] - 1))

    def _clear(self, slots_n: torch.Tensor, blocks_n: torch.Tensor) -> None:
        """Unused memory may hold anything, NaN included, and NaN would not be equal to itself everywhere."""
        self._ops.moves.zero(self._pools.slot_bytes_Zb, slots_n)
        self._ops.moves.zero(self._pools.block_bytes_Nb, blocks_n)


def _rows_of_requests(rows: int, per_request: int) -> NDArray[np.int64]:
    """Return as few requests as hold the rows; the last one has what is left."""
    full, rest = divmod(rows, per_request)
    return np.array([per_request] * full + ([rest] if rest else []), dtype=np.int64)
