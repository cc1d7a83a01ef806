"""Op group ``selection``: scores of what a row may see, and the best of it.

Legend: T rows, J index heads, I index width, K top-k, B candidate blocks, n competitors.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import IndexCache
from deepinfer.accelerator.ops.selection import Selection, SelectionOps, SelectionRule
from deepinfer_triton.arithmetic import (
    ACTIVATION_DTYPES,
    TritonGroup,
    refuse,
    require_dtype,
    require_float,
    require_width,
)
from deepinfer_triton.configuration import Configuration, launch, power_of_two
from deepinfer_triton.index_scores import (
    ROUNDED_BLOCKS,
    ROWS_PER_PROGRAM,
    TILE,
    TILES_PER_PROGRAM,
    rounding_configuration,
    scores_configuration,
    scores_configurations,
)
from deepinfer_triton.radix_selection import (
    FILL,
    block_keys_configuration,
    everything_configuration,
    selection_configuration,
)
from deepinfer_triton.record_layout import FLOAT32, index_places, kind_of
from deepinfer_triton.rows import ALIGNMENT_BYTES, consecutive, flat_rows
from deepinfer_triton.sizes import ModelSizes

NAME = "selection.top_entries"
CANDIDATE_BLOCK = 8
"""Entries of a candidate block in every known model (model.md section 6)."""

SCRATCH_BYTES = 256 * 2**20
"""Bytes of scores that are held at a time: rows are taken in pieces that fit, whose bits do not depend on the cut."""


class TritonSelectionOps(TritonGroup, SelectionOps):
    """Scores as integers in scratch memory, then radix selection; R2 because no row's scores depend on another's."""

    def top_entries(
        self,
        query_TJI: Tensor,
        head_weight_TJ: Tensor,
        keys: IndexCache,
        step: StepLayout,
        rule: SelectionRule,
        candidates_TB: Tensor | None = None,
    ) -> Selection:
        """See :meth:`SelectionOps.top_entries`."""
        _check(query_TJI, head_weight_TJ, keys, step, candidates_TB)
        rows, device = step.rows, query_TJI.device
        entries_TK = torch.empty((rows, rule.top_k), dtype=torch.int64, device=device)
        blocks_TB = torch.empty((rows, rule.candidate_blocks), dtype=torch.int64, device=device)
        selection = Selection(entries_TK, blocks_TB if rule.publish else None)
        if rows == 0 or step.requests == 0:
            entries_TK.fill_(-1)
            blocks_TB.fill_(-1)
            return selection
        restriction_TB = None if rule.publish else candidates_TB
        visible = step.max_position // keys.ratio
        blocks = -(-visible // rule.candidate_block_size)
        everything = restriction_TB is None and visible <= rule.top_k
        every_block = rule.publish and blocks <= rule.candidate_blocks
        if everything:
            _keep_everything(entries_TK, step, keys.ratio, 1)
        if every_block:
            _keep_everything(blocks_TB, step, keys.ratio, rule.candidate_block_size)
        if everything and (every_block or not rule.publish):
            return selection
        scores = _Scores(query_TJI, head_weight_TJ, keys, step, restriction_TB, rule.candidate_block_size)
        tile = max(1, SCRATCH_BYTES // (4 * scores.competitors))
        for first in range(0, rows, tile):
            last = min(first + tile, rows)
            keys_tn = scores.of_rows(first, last)
            if not everything:
                listed = 0 if restriction_TB is None else scores.competitors
                size = 1 if restriction_TB is None else rule.candidate_block_size
                _select(keys_tn, entries_TK, step, keys.ratio, first, size, listed, restriction_TB)
            if rule.publish and not every_block:
                size = rule.candidate_block_size
                block_keys_tb = _block_keys(keys_tn, step, keys.ratio, first, size)
                _select(block_keys_tb, blocks_TB, step, keys.ratio, first, size, 0, None)
        return selection


class _Scores:
    """The scores of a call, a few rows at a time.

    Attributes:
        competitors: of a row, at most.
    """

    def __init__(
        self,
        query_TJI: Tensor,
        head_weight_TJ: Tensor,
        keys: IndexCache,
        step: StepLayout,
        candidates_TB: Tensor | None,
        candidate_size: int,
    ) -> None:
        self._kind = kind_of(NAME, keys.format)
        self._places = index_places(NAME, keys)
        self._query_TJI = query_TJI if self._kind == FLOAT32 else _rounded(query_TJI, keys.format.group)
        self._query_TJI = flat_rows(self._query_TJI).contiguous().view(query_TJI.shape)
        self._weight_TJ = flat_rows(head_weight_TJ).contiguous()
        self._step, self._ratio, self._size = step, keys.ratio, candidate_size
        self._candidates_TB = None if candidates_TB is None else candidates_TB.contiguous()
        visible = step.max_position // keys.ratio
        self.competitors = visible if candidates_TB is None else candidates_TB.shape[1] * candidate_size
        width = keys.format.width
        numbers = (self._places.memory.storage_offset(), self._places.outer_stride, self._places.data_stride)
        fits = self._kind != FLOAT32 and all(number % ALIGNMENT_BYTES == 0 for number in numbers)
        self._configuration = scores_configuration(
            width,
            query_TJI.shape[1],
            self._kind,
            self._query_TJI.dtype,
            head_weight_TJ.dtype,
            ALIGNMENT_BYTES if fits else 1,
            restricted=candidates_TB is not None,
        )

    def of_rows(self, first: int, last: int) -> Tensor:
        """Return the order keys int32 [t, n] of some rows; what a row does not see is not written."""
        step, heads = self._step, self._query_TJI.shape[1]
        keys_tn = torch.empty((last - first, self.competitors), dtype=torch.int32, device=self._query_TJI.device)
        row_blocks = -(-step.max_rows // ROWS_PER_PROGRAM)
        pieces = -(-self.competitors // (TILE * TILES_PER_PROGRAM))
        restricted = self._candidates_TB is not None
        table_RB = consecutive(step.block_table_RB)
        places = self._places
        launch(
            self._configuration,
            (last - first if restricted else step.requests * row_blocks, pieces),
            self._query_TJI,
            self._weight_TJ,
            places.memory,
            table_RB,
            table_RB if self._candidates_TB is None else self._candidates_TB,
            consecutive(step.position_T),
            consecutive(step.request_T),
            consecutive(step.valid_T),
            consecutive(step.row_starts_R1),
            keys_tn,
            places.inner_count,
            places.outer_stride,
            places.data_stride,
            places.scale_start,
            places.scale_stride,
            table_RB.stride(0),
            self._ratio,
            first,
            last,
            row_blocks,
            self.competitors,
            self._size,
            heads,
        )
        return keys_tn


def _rounded(query_TJI: Tensor, group: int) -> Tensor:
    """Return what index records hold of the queries, in bfloat16, which has room for it."""
    x_nI = flat_rows(query_TJI).contiguous()
    rounded_nI = torch.empty(x_nI.shape, dtype=torch.bfloat16, device=x_nI.device)
    blocks = x_nI.numel() // group
    launch(rounding_configuration(group, x_nI.dtype), (-(-blocks // ROUNDED_BLOCKS),), x_nI, rounded_nI, blocks)
    return rounded_nI


def _select(
    keys_tn: Tensor,
    out_TK: Tensor,
    step: StepLayout,
    ratio: int,
    first: int,
    size: int,
    listed: int,
    candidates_TB: Tensor | None,
) -> None:
    position_T = consecutive(step.position_T)
    launch(
        selection_configuration(restricted=candidates_TB is not None),
        (keys_tn.shape[0],),
        keys_tn,
        position_T,
        consecutive(step.valid_T),
        position_T if candidates_TB is None else candidates_TB.contiguous(),
        out_TK,
        keys_tn.stride(0),
        first,
        ratio,
        size,
        listed,
        out_TK.shape[1],
    )


def _block_keys(keys_tn: Tensor, step: StepLayout, ratio: int, first: int, size: int) -> Tensor:
    blocks = -(-keys_tn.shape[1] // size)
    block_keys_tb = torch.empty((keys_tn.shape[0], blocks), dtype=torch.int32, device=keys_tn.device)
    chosen = block_keys_configuration(power_of_two(size))
    launch(
        chosen,
        (keys_tn.shape[0], -(-blocks // int(chosen.constants["BLOCKS"]))),
        keys_tn,
        consecutive(step.position_T),
        consecutive(step.valid_T),
        block_keys_tb,
        keys_tn.stride(0),
        block_keys_tb.stride(0),
        first,
        ratio,
        size,
    )
    return block_keys_tb


def _keep_everything(out_TK: Tensor, step: StepLayout, ratio: int, size: int) -> None:
    rows, top_k = out_TK.shape
    launch(
        everything_configuration(),
        (rows, -(-top_k // FILL)),
        consecutive(step.position_T),
        consecutive(step.valid_T),
        out_TK,
        ratio,
        size,
        top_k,
    )


def configurations(sizes: ModelSizes) -> Iterator[Configuration]:
    """Yield what a model's indexers use."""
    yield from scores_configurations(sizes.index_width, sizes.index_heads, ACTIVATION_DTYPES)
    yield from (selection_configuration(restricted=restricted) for restricted in (False, True))
    yield everything_configuration()
    yield block_keys_configuration(CANDIDATE_BLOCK)


def _check(
    query_TJI: Tensor,
    head_weight_TJ: Tensor,
    keys: IndexCache,
    step: StepLayout,
    candidates_TB: Tensor | None,
) -> None:
    require_float(NAME, "query", query_TJI)
    require_float(NAME, "head weights", head_weight_TJ)
    require_width(NAME, "query", query_TJI, keys.format.width)
    if query_TJI.dim() != 3 or tuple(head_weight_TJ.shape) != tuple(query_TJI.shape[:2]):
        shapes = f"queries {tuple(query_TJI.shape)} and head weights {tuple(head_weight_TJ.shape)}"
        refuse(NAME, f"{shapes} do not belong together; give [T, J, I] and [T, J]")
    if query_TJI.shape[0] != step.rows:
        refuse(NAME, f"there are queries of {query_TJI.shape[0]} rows; the step has {step.rows}")
    if candidates_TB is not None:
        require_dtype(NAME, "candidates", candidates_TB, torch.int64)
        if candidates_TB.shape[0] != step.rows:
            refuse(NAME, f"there are candidates of {candidates_TB.shape[0]} rows; the step has {step.rows}")
