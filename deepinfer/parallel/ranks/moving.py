"""Experts that move while the ranks serve: counted, planned alike on every rank, exchanged, and switched between steps.

All of it happens where a step of the group has passed the layers, on the thread or queue that runs them: behind the
step's own exchanges of the expert group, and before those of the next one. Every rank counts the same steps, so all of
them come here together.

Legend: T steps of a window, L layers, E experts, S slots of all ranks, k experts per token, D hidden size.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from deepinfer.accelerator import Collectives
from deepinfer.accelerator.ops import Ops
from deepinfer.accelerator.ops.experts import Routing
from deepinfer.accelerator.weights import ExpertSlot, PreparedWeight
from deepinfer.errors import ArgumentError, InvariantError
from deepinfer.parallel.balancer import Change, ExpertBalancer
from deepinfer.parallel.exchange import ExpertPart
from deepinfer.parallel.loads import MOST_PAIRS_PER_STEP, LoadWindow
from deepinfer.parallel.placement import Layout, PlacementShape
from deepinfer.parallel.policy import BalancePolicy
from deepinfer.parallel.ranks.experts import SpreadExperts
from deepinfer.parallel.ranks.reports import BalanceReport
from deepinfer.parallel.ranks.slot_moves import exchange_layer, form_of, slot_bytes
from deepinfer.parallel.shares import busiest_over_mean

_LOG = logging.getLogger(__name__)
_MOST_SUMS: Final = 128
"""Sums of neighbouring steps in which a long window is agreed on and planned from."""
_PIECE_BYTES: Final = 4 << 20
"""Counts that are added up in one exchange: where sums are made of all ranks' tensors, these lie side by side."""


class MovingExperts(SpreadExperts):
    """Experts spread over the ranks of a group, which moves them towards an even load.

    A move changes no bit of an answer: copies hold equal bytes, weights and scales move together, and the maps switch
    once everything has arrived, between two steps.

    Attributes:
        shape: how many slots there are on how many ranks.
        maps: which slots hold which expert, the same on every rank.
    """

    def __init__(
        self,
        group: Collectives,
        shape: PlacementShape,
        device: torch.device,
        policy: BalancePolicy,
        *,
        interval_steps: int,
        window_steps: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Place the experts as they are at start-up; nothing is counted before :meth:`begin_serving`."""
        super().__init__(group, shape, device)
        self._policy = policy
        self._interval_steps, self._window_steps = interval_steps, window_steps
        self._clock = clock
        self._prepared: dict[int, PreparedWeight] = {}
        self._balancer: ExpertBalancer | None = None
        self._counts_LE = torch.zeros((shape.layers, shape.experts), dtype=torch.int64, device=device)
        self._report = BalanceReport()

    def hold(self, layer: int, experts: PreparedWeight) -> None:
        """Take what was prepared of a layer's slots on this rank."""
        self._prepared[layer] = experts

    def begin_serving(self) -> None:
        """Make sure that all slots of a layer may hold each other's experts, and count from now on.

        Raises:
            OpRefusedError: the driver cannot move experts.
            ArgumentError: the experts of a layer were not prepared alike; every rank of the group raises it.
        """
        forms = [sorted({form_of(slot) for slot in self._slots(layer)}) for layer in range(self.shape.layers)]
        problems = [
            f"layer {layer} holds experts of several forms: {'; '.join(found)}"
            for layer, found in enumerate(forms)
            if len(found) > 1
        ]
        if others := self._unlike_rank_0(repr(forms).encode()):
            problems.append(f"ranks {others} of the group prepared theirs unlike rank 0")
        if problems:
            problems.append(
                "experts that are stored or prepared differently cannot take each other's place; leave them where they "
                "are: expert_balancing='off'"
            )
            raise ArgumentError("moving experts", problems)
        first = self._slots(0)[0]
        parts = tuple(
            ExpertPart(f"part {number}", tensor.numel() * tensor.element_size())
            for number, tensor in enumerate(first.tensors)
        )
        self._balancer = ExpertBalancer(
            self.shape, self._policy, parts, interval_steps=self._interval_steps, window_steps=self._window_steps
        )

    def routed(
        self,
        layer: int,
        x_TD: torch.Tensor,
        routing: Routing,
        key_T: torch.Tensor,
        experts: PreparedWeight,
        ops: Ops,
    ) -> torch.Tensor:
        """Return slot outputs [T, k, D], and count what this rank's rows have chosen; rows without expert count not."""
        if self._balancer is not None:
            # Place 0 is for rows without expert: padding, placeholders of drafts.
            counts_E1 = torch.bincount(routing.experts_Tk.flatten() + 1, minlength=self.shape.experts + 1)
            self._counts_LE[layer] += counts_E1[1:]
        return super().routed(layer, x_TD, routing, key_T, experts, ops)

    def end_step(self) -> None:
        """Close a step of the group; where a plan is due, agree on the load, plan, move, and switch."""
        balancer = self._balancer
        if balancer is None:
            return
        balancer.counter.add_counts(self._counts_LE.cpu().numpy())
        self._counts_LE.zero_()
        self._report = replace(self._report, steps=self._report.steps + 1)
        if balancer.end_step():
            self._replan(balancer)

    def report(self) -> BalanceReport:
        """Return what balancing has done so far."""
        return self._report

    def _replan(self, balancer: ExpertBalancer) -> None:
        begun_s = self._clock()
        window = self._summed(balancer.counter.window().folded(_MOST_SUMS))
        before_LS = balancer.maps.layout_LS
        change = balancer.propose(window)
        after_LS = before_LS if change is None else change.after.layout_LS
        self._require_one_plan(after_LS)
        moved_bytes = 0 if change is None else self._move(change)
        if change is not None:
            balancer.switch(change)
            self._route_by(change.after)
        ranks = self.shape.ranks
        report = replace(
            self._report,
            plans=self._report.plans + 1,
            changes=self._report.changes + (change is not None),
            moved_experts=self._report.moved_experts + int((before_LS != after_LS).sum()),
            moved_bytes=self._report.moved_bytes + moved_bytes,
            seconds=self._report.seconds + self._clock() - begun_s,
            busiest_over_mean=float(busiest_over_mean(window, before_LS, ranks).mean()),
            planned_busiest_over_mean=float(busiest_over_mean(window, after_LS, ranks).mean()),
        )
        self._tell(self._report, report)
        self._report = report

    def _summed(self, window: LoadWindow) -> LoadWindow:
        """Return the group's counts, from those of this rank: every rank has the same steps."""
        rows_per_piece = max(1, _PIECE_BYTES // (8 * self.shape.layers * self.shape.experts))
        pieces = [
            self._group.all_reduce_sum(piece_TLE.to(self._device)).cpu()
            for piece_TLE in torch.split(torch.from_numpy(window.counts_TLE), rows_per_piece)
        ]
        counts_TLE = torch.cat(pieces).numpy()
        # Scaled by one power of two for the whole window, so that proportions stay.
        while counts_TLE.sum(axis=2).max() > MOST_PAIRS_PER_STEP:
            counts_TLE = counts_TLE // 2
        return LoadWindow(np.ascontiguousarray(counts_TLE))

    def _require_one_plan(self, layout_LS: Layout) -> None:
        """Raise InvariantError, on every rank, unless all have the same layout in mind: nothing was moved yet."""
        if others := self._unlike_rank_0(layout_LS.tobytes()):
            raise InvariantError(
                f"ranks {others} of the expert group planned another layout than rank 0 from the same loads; are all "
                f"of them running the same version?"
            )

    def _unlike_rank_0(self, message: bytes) -> str:
        """Return which ranks of the group have another message than rank 0, all ranks alike; empty for none."""
        digest = torch.frombuffer(bytearray(hashlib.sha256(message).digest()), dtype=torch.uint8)
        digests = self._group.all_gather(digest.to(self._device)).cpu()
        return ", ".join(str(rank) for rank, each in enumerate(digests) if not torch.equal(each, digests[0]))

    def _move(self, change: Change) -> int:
        """Fill all slots of a change and return the bytes that went between ranks: the same number on each."""
        mine = change.exchange.for_rank(self._group.rank)
        crossing = Counter(move.layer for move in change.exchange.crossing)
        moved_bytes = 0
        for layer in sorted({move.layer for move in change.exchange.moves}):
            slots = self._slots(layer)
            exchange_layer(slots, mine.of_layer(layer), self._group, self.shape.slots_per_rank, self._device)
            moved_bytes += slot_bytes(slots[0]) * crossing[layer]
        return moved_bytes

    def _slots(self, layer: int) -> tuple[ExpertSlot, ...]:
        return self._prepared[layer].expert_slots()

    def _tell(self, before: BalanceReport, after: BalanceReport) -> None:
        if self._group.rank:
            return
        moved = after.moved_experts - before.moved_experts
        _LOG.log(
            logging.INFO if moved else logging.DEBUG,
            "experts: %d of %d slots filled anew, %.1f MiB between ranks, %.3f s; busiest over mean %.3f -> %.3f",
            moved,
            self.shape.layers * self.shape.slots,
            (after.moved_bytes - before.moved_bytes) / 2**20,
            after.seconds - before.seconds,
            after.busiest_over_mean,
            after.planned_busiest_over_mean,
        )
