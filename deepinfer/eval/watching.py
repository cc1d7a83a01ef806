"""What happens inside while questions are answered: where attention goes, and which experts work.

A driver around the accelerator's own looks at the arguments of two ops before they run. Which layer calls is read from
the weights that it passes: layers call in order, so the first call of each tells its number.

Legend: T rows, H heads, C head width, W window positions, K selected entries, n keys, k experts per token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer.accelerator import AcceleratorDriver, OpOptions, StepLayout, WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.ops.codec import CodecOps
from deepinfer.accelerator.ops.experts import RouterWeights, Routing
from deepinfer.accelerator.wrapped import OpFunction, WrappedDriver

_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class AttentionShares:
    """Where a layer's attention goes, averaged over heads and all rows that were computed.

    Attributes:
        layer: its number.
        window: share on the window, the row itself included.
        entries: share on selected compressed entries; 0 in a layer without.
        sink: share that goes nowhere.
    """

    layer: int
    window: float
    entries: float
    sink: float


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How often each expert of a layer was chosen.

    Attributes:
        layer: its number; draft stages follow the layers.
        rows: choices of each expert, in id order.
    """

    layer: int
    rows: tuple[int, ...]

    @property
    def busiest_to_mean(self) -> float:
        """The busiest expert's rows over the mean; 1 is even."""
        total = sum(self.rows)
        return max(self.rows) * len(self.rows) / total if total else 0.0


class WatchingDriver(WrappedDriver):
    """Another driver, watched. Recorded graphs must be off: a replay calls no op.

    Args:
        inner: what is watched.
        long_range: False takes the selected entries away from every layer: the control for what only they can answer.
    """

    def __init__(self, inner: AcceleratorDriver, *, long_range: bool = True) -> None:
        super().__init__(inner)
        self._long_range = long_range
        self._masses: dict[int, Tensor] = {}
        self._chosen: dict[int, Tensor] = {}
        self._steps: list[list[Tensor]] = []
        # Held, so that an address cannot become another weight's.
        self._weights: list[Tensor] = []

    def around(self, identifier: str, function: OpFunction, options: OpOptions) -> OpFunction:
        """Return the two watched ops with a look at their arguments before them."""
        if identifier == "attention.sparse":
            return self._watched_attention(function, options)
        return self._watched_router(function) if identifier == "experts.route" else function

    def forget(self) -> None:
        """Begin anew: what an engine ran at its start, to measure what steps cost, answers no question."""
        self._masses.clear()
        self._chosen.clear()
        self._steps.clear()
        self._weights.clear()

    def attention(self) -> tuple[AttentionShares, ...]:
        """Return where attention has gone so far, layer by layer; nothing where nothing was computed."""
        found = []
        for layer, masses in enumerate(self._masses.values()):
            window, entries, sink = (masses / masses.sum()).tolist()
            found.append(AttentionShares(layer, window, entries, sink))
        return tuple(found)

    def experts(self) -> tuple[ExpertLoad, ...]:
        """Return how often experts were chosen so far, layer by layer."""
        return tuple(ExpertLoad(layer, tuple(rows.tolist())) for layer, rows in enumerate(self._chosen.values()))

    def loads(self, layers: int) -> list[list[list[int]]]:
        """Return how often each expert was chosen, nested as steps, layers, experts.

        Args:
            layers: of the model; the draft stages behind them are left out.
        """
        return [[rows.tolist() for rows in step[:layers]] for step in self._steps]

    def _watched_attention(self, function: OpFunction, options: OpOptions) -> OpFunction:
        codec = self._inner.op_groups(options)["codec"]
        if not isinstance(codec, CodecOps):
            message = f"group 'codec' of driver {self._inner.name!r} is no CodecOps"
            raise TypeError(message)

        def sparse(
            query_THC: Tensor,
            own_records_Tb: Tensor,
            window: WindowCache,
            long_range: LongRange | None,
            sinks_H: Tensor,
            window_size: int,
            step: StepLayout,
        ) -> object:
            if not self._long_range:
                long_range = None
            keys = _Keys(codec, own_records_Tb, window, long_range, window_size, step)
            masses = _masses(query_THC, keys, sinks_H, step)
            self._add(self._masses, sinks_H, masses)
            return function(query_THC, own_records_Tb, window, long_range, sinks_H, window_size, step)

        return sparse

    def _watched_router(self, function: OpFunction) -> OpFunction:
        def route(
            x_TD: Tensor, router: RouterWeights, image_T: Tensor, valid_T: Tensor, top_k: int, scale: float
        ) -> object:
            routing = function(x_TD, router, image_T, valid_T, top_k, scale)
            if not isinstance(routing, Routing):
                message = f"experts.route of driver {self._inner.name!r} returned a {type(routing).__name__}"
                raise TypeError(message)
            experts = routing.experts_Tk[routing.experts_Tk >= 0].cpu()
            chosen = torch.bincount(experts, minlength=len(router.bias_E))
            self._add(self._chosen, router.bias_E, chosen)
            if next(iter(self._chosen)) == router.bias_E.data_ptr():  # the first layer begins a step
                self._steps.append([])
            self._steps[-1].append(chosen)
            return routing

        return route

    def _add(self, tallies: dict[int, Tensor], weight: Tensor, counts: Tensor) -> None:
        """Add counts to those of the layer that owns a weight."""
        if weight.data_ptr() not in tallies:
            tallies[weight.data_ptr()] = torch.zeros_like(counts)
            self._weights.append(weight)
        tallies[weight.data_ptr()] += counts


class _Keys:
    """The keys of each row of a step, decoded from the caches as the contract lays them out."""

    def __init__(
        self,
        codec: CodecOps,
        own_records_Tb: Tensor,
        window: WindowCache,
        long_range: LongRange | None,
        window_size: int,
        step: StepLayout,
    ) -> None:
        self._codec, self._window, self._long_range, self._step = codec, window, long_range, step
        self._own_TC = window.format.decode(own_records_Tb)
        self._before_W = torch.arange(window_size - 1, -1, -1, device=own_records_Tb.device)

    def in_window(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys [T, W, C] of the given rows, and which of them exist [T, W]."""
        step, request = self._step, self._step.request_T[rows]
        position_TW = step.position_T[rows, None] - self._before_W
        cached_T1 = step.cached_R[request, None]
        exists_TW = position_TW >= step.window_start_R[request, None].clamp(min=0)
        is_own_TW = exists_TW & (position_TW >= cached_T1)
        ring_TW = step.state_slots_R[request, None] * self._window.ring + position_TW % self._window.ring
        slot_TW = torch.where(exists_TW & ~is_own_TW, ring_TW, -1)
        keys_TWC = self._codec.gather_window(self._window, slot_TW.flatten()).view(*slot_TW.shape, -1)
        own_TW = (step.row_starts_R1[request, None] + position_TW - cached_T1).clamp(0, step.rows - 1)
        return torch.where(is_own_TW[..., None], self._own_TC[own_TW], keys_TWC), exists_TW

    def entries(self, rows: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return keys [T, K, C] of the entries that the given rows selected, and which of them exist [T, K]."""
        if self._long_range is None:
            return None
        step, cache, entry_TK = self._step, self._long_range.cache, self._long_range.entries_TK[rows]
        exists_TK, size = entry_TK >= 0, cache.entries_per_block
        block_TK = step.block_table_RB[step.request_T[rows]].gather(1, entry_TK.clamp(min=0) // size)
        slot_TK = torch.where(exists_TK, block_TK * size + entry_TK % size, -1)
        return self._codec.gather_entries(cache, slot_TK.flatten()).view(*slot_TK.shape, -1), exists_TK


def _masses(query_THC: Tensor, keys: _Keys, sinks_H: Tensor, step: StepLayout) -> Tensor:
    """Return the attention on window, entries and sink, summed over valid rows and averaged over heads: [3]."""
    sums = torch.zeros(3, dtype=torch.float64)
    for rows in torch.split(step.valid_T.nonzero().flatten(), _ROWS_AT_ONCE):
        query = query_THC[rows].to(torch.float32)
        parts = [keys.in_window(rows)]
        entries = keys.entries(rows)
        if entries is not None:
            parts.append(entries)
        scores = [
            (torch.einsum("thc,tnc->thn", query, key) * query.shape[-1] ** -0.5).masked_fill(
                ~exists[:, None], -torch.inf
            )
            for key, exists in parts
        ]
        sink = sinks_H.to(torch.float32).view(1, -1, 1).expand(len(rows), -1, 1)
        shares = torch.softmax(torch.cat((*scores, sink), -1), -1).mean(1).sum(0).double().cpu()
        window = scores[0].shape[-1]
        sums += torch.stack((shares[:window].sum(), shares[window:-1].sum(), shares[-1]))
    return sums
