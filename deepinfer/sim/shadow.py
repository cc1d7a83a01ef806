"""A worker without a model: it writes token ids through the scheduled addresses and reads them back.

The next token is a hash of the request's history as memory gives it, so a wrong block, slot, position, copy or a stale
place shows as a wrong token, at a hundredth of the cost of the oracle driver. What only a model has (pending pairs,
index keys, picks) is not shadowed; the oracle driver has it.

Legend: R requests of a step, P positions of a request, N blocks, Z state slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer.accelerator import registry
from deepinfer.accelerator.ops.sampling import RowStatus
from deepinfer.cache.layout import CacheLayout
from deepinfer.engine.build import plan_ops, scheduler_config
from deepinfer.engine.engine import Engine
from deepinfer.engine.handing_out import HandedOut
from deepinfer.engine.memory import PoolPlan, plan_pools
from deepinfer.engine.readback import Results, ToHost
from deepinfer.engine.worker import RowExtras, WorkerCounts
from deepinfer.errors import InvariantError
from deepinfer.model.config import ModelConfig
from deepinfer.model.roles import derive_roles
from deepinfer.sampling.grammar import FormCompiler
from deepinfer.sampling.request import RowFlag
from deepinfer.sampling.sampler import SampledRow
from deepinfer.sampling.verification import RunRequest, VerifiedRun
from deepinfer.scheduling.step import ScheduledStep
from deepinfer.scheduling.table import NO_TOKEN
from deepinfer.settings import Settings
from deepinfer.sim.drafter import scripted
from deepinfer.sim.faults import FailingWorker, FaultPlace
from deepinfer.sim.forms import tokens_of, unpacked, without
from deepinfer.sim.lengths import ErraticLengths, lots
from deepinfer.sim.scenario import Scenario
from deepinfer.sim.wishes import Foreteller, by_hash

_POSITION_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
_SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)
_WINDOW_SALT = np.uint64(0x632BE59BD9B4E019)
_GARBAGE = 7


class _Written(NamedTuple):
    """A step that has written its ids."""

    step: ScheduledStep
    drafts: list[list[int]]


class _ShadowResults(NamedTuple):
    """What a shadow step came to."""

    emitted: list[VerifiedRun]
    drafts: list[list[int]]
    num_drafts: int

    def runs(self) -> list[VerifiedRun]:
        """Return what each request emits."""
        return self.emitted

    def next_drafts(self) -> list[list[int]] | None:
        """Return the drafts of each request's next step."""
        return self.drafts

    def next_chances(self) -> NDArray[np.float64]:
        """Return nothing: lengths that are drawn by lot listen to no chances."""
        return np.zeros((len(self.drafts), self.num_drafts))


class ShadowWorker(FailingWorker):
    """Keeps the ids of every position where the scheduler says that its cache lies."""

    def __init__(
        self,
        config: ModelConfig,
        layout: CacheLayout,
        pools: PoolPlan,
        rule: ShadowRule,
        foreteller: Foreteller,
        *,
        drafts: int = 0,
    ) -> None:
        self.speculation = None
        self._num_drafts = drafts
        # What the next step of each slot begins with: positions that are computed, and the newest token.
        self._progress: dict[int, tuple[int, int]] = {}
        # Drafts of each slot, with the occupation that they belong to.
        self._made: dict[int, tuple[int, list[int]]] = {}
        self._config = config
        self._rule = rule
        self._foreteller = foreteller
        self._block_size = layout.block_size
        self._ring = layout.ring
        # Unowned memory holds anything but zeros, which would look innocent.
        self._blocks_NP = np.full((pools.num_blocks, layout.block_size), _GARBAGE, np.int64)
        self._rings_ZP = np.full((pools.num_state_slots, layout.ring), _GARBAGE, np.int64)

    def copy(self, step: ScheduledStep) -> None:
        """Copy blocks and slots as a device would."""
        self._fail_at(FaultPlace.COPY)
        for source, destination in step.block_copies:
            self._blocks_NP[destination] = self._blocks_NP[source]
        for source, destination in step.slot_copies:
            self._rings_ZP[destination] = self._rings_ZP[source]

    def run(
        self,
        step: ScheduledStep,
        requests: Sequence[RunRequest],
        extras: Sequence[RowExtras],  # noqa: ARG002
    ) -> list[VerifiedRun]:
        """Write the step's ids, read each history back, and return the tokens that follow from it."""
        self._fail_at(FaultPlace.BEFORE)
        drafts = self.drafts(step)
        self._write_all(step, drafts)
        runs = [self._judge(step, number, drafts[number], request) for number, request in enumerate(requests)]
        self._fail_at(FaultPlace.AFTER)
        return runs

    def hand_out(self, step: ScheduledStep, to_host: ToHost) -> HandedOut:
        """Share out the rows of a step by lot: what is emitted must not depend on it."""
        self._fail_at(FaultPlace.BEFORE)
        places = np.repeat(np.arange(step.num_requests), self._num_drafts)
        luck = np.random.default_rng(lots(step.number, step.table_row_R, step.epoch_R)).permutation(len(places))
        taken = places[luck[: step.num_tokens - step.num_requests]]
        drafts_R = np.bincount(taken, minlength=step.num_requests)
        return HandedOut(_with_drafts(step, drafts_R), to_host(torch.from_numpy(drafts_R)))

    def learn(self, step: ScheduledStep, step_s: float, sampler_s: float) -> None:
        """Learn nothing: a shadow's steps cost nothing."""

    def begin(
        self,
        step: ScheduledStep,
        extras: Sequence[RowExtras],  # noqa: ARG002
        handed: HandedOut | None = None,
    ) -> _Written:
        """Copy, and write the step's ids where each request really stands."""
        self.copy(step)
        self._fail_at(FaultPlace.BEFORE)
        true_step = self._corrected(step if handed is None else handed.inputs)
        drafts = [self._stored(true_step, number) for number in range(true_step.num_requests)]
        self._write_all(true_step, drafts)
        return _Written(true_step, drafts)

    def finish(
        self,
        begun: Any,
        step: ScheduledStep,
        requests: Sequence[RunRequest],
        extras: Sequence[RowExtras],  # noqa: ARG002
        to_host: ToHost,  # noqa: ARG002
    ) -> Results:
        """Read each history back; what follows from it, and the drafts behind that."""
        written: _Written = begun
        true_step, drafts = written
        runs, following = [], []
        for number, request in enumerate(requests):
            run = self._judge(true_step, number, drafts[number], request)
            runs.append(run)
            made = self._next_drafts(true_step, number, run)[: step.round_drafts]
            following.append(made)
            self._made[int(step.state_slot_R[number])] = (int(step.epoch_R[number]), made)
            if true_step.kind == "decode":
                computed = int(true_step.cached_R[number]) + 1 + run.accepted
                self._progress[int(true_step.state_slot_R[number])] = (computed, run.rows[-1].token_id)
        self._fail_at(FaultPlace.AFTER)
        return _ShadowResults(runs, following, self._num_drafts)

    def _corrected(self, step: ScheduledStep) -> ScheduledStep:
        """Return the step as it really is: without rejected drafts, with its newest tokens and look-backs."""
        cached_R, q_R, history_RG = step.cached_R.copy(), step.q_R.copy(), step.history_RG.copy()
        rows = np.split(step.input_ids_T, np.cumsum(step.q_R)[:-1])
        for number in (step.in_flight_R > 0).nonzero()[0].tolist():
            cached, newest = self._progress[int(step.state_slot_R[number])]
            if newest < 0 or cached >= step.k_R[number]:
                rows[number], q_R[number] = rows[number][:0], 0  # it has ended, or has no position left
                continue
            cached_R[number] = cached
            rows[number] = np.array([newest, *rows[number][1:]], np.int64)
            known = self._history(step, number, cached)[::-1][: history_RG.shape[1]]
            history_RG[number, : len(known)] = known
        q_R = np.minimum(q_R, np.maximum(step.k_R - cached_R, 0))
        ids_T = np.concatenate([ids[:q] for ids, q in zip(rows, q_R.tolist(), strict=True)])
        return replace(step, cached_R=cached_R, q_R=q_R, k_R=cached_R + q_R, input_ids_T=ids_T, history_RG=history_RG)

    def _stored(self, step: ScheduledStep, number: int) -> list[int]:
        """Return the drafts that a round has left for a request, as many as it has rows for."""
        epoch, made = self._made.get(int(step.state_slot_R[number]), (-1, []))
        if step.kind != "decode" or epoch != step.epoch_R[number]:
            return []
        return list(takewhile(lambda token_id: token_id >= 0, made[: max(0, int(step.q_R[number]) - 1)]))

    def _write_all(self, step: ScheduledStep, drafts: Sequence[Sequence[int]]) -> None:
        """Write the ids of every row."""
        ends = np.cumsum(step.q_R)
        for number, end in enumerate(ends.tolist()):
            ids = step.input_ids_T[end - int(step.q_R[number]) : end]
            if step.kind == "decode" and len(ids):
                ids = np.array([ids[0], *drafts[number]], np.int64)
            if len(ids):
                self._write(step, number, ids)

    def _next_drafts(self, step: ScheduledStep, number: int, run: VerifiedRun) -> list[int]:
        """Return scripted drafts behind what a run has added."""
        if not self._num_drafts or step.is_partial_R[number] or run.rows[-1].token_id < 0:
            return []
        length = int(step.k_R[number]) if step.kind == "prefill" else int(step.cached_R[number]) + 1 + run.accepted
        ids = [*self._history(step, number, length).tolist(), run.rows[-1].token_id]
        return self._scripted(step, number, ids, self._num_drafts)

    def counts(self) -> WorkerCounts:
        """A shadow counts nothing."""
        return WorkerCounts()

    def drafts(self, step: ScheduledStep) -> list[list[int]]:
        """Return scripted drafts, from what the memory holds before the step."""
        return [self._drafts_of(step, number) for number in range(step.num_requests)]

    def _drafts_of(self, step: ScheduledStep, number: int) -> list[int]:
        count = int(step.q_R[number]) - 1
        if step.kind != "decode" or count < 1:
            return []
        first = int(step.q_R[:number].sum())
        ids = [*self._history(step, number, int(step.cached_R[number])).tolist(), int(step.input_ids_T[first])]
        return list(takewhile(lambda token_id: token_id >= 0, self._scripted(step, number, ids, count)))

    def _scripted(self, step: ScheduledStep, number: int, ids: list[int], count: int) -> list[int]:
        sequence = step.sequences[number]
        right = self._foreteller.tokens(sequence.request_id, ids, sequence.num_prompt_tokens, count)
        return scripted(sequence.request_id, len(ids), right, self._config.vocab_size)

    def _judge(self, step: ScheduledStep, number: int, drafts: Sequence[int], request: RunRequest) -> VerifiedRun:
        first = int(step.k_R[number]) if step.kind == "prefill" else int(step.cached_R[number]) + 1
        if not step.q_R[number]:
            return VerifiedRun((SampledRow(-1, RowStatus.OK, None),), 0)
        rows = []
        for place in range(1 + len(drafts)):
            rows.append(self._chosen(self._read(step, number, first + place), request, place))
            if place == len(drafts) or rows[-1].token_id != drafts[place]:
                break
        return VerifiedRun(tuple(rows), len(rows) - 1)

    def _chosen(self, token_id: int, request: RunRequest, place: int) -> SampledRow:
        """Return what the engine's description of a row makes of the token of the rule."""
        sampling, vocab_size = request.sampling, self._config.vocab_size
        if request.allowed_mW is None and not sampling.flags & (RowFlag.ALLOWED | RowFlag.BANS):
            return SampledRow(token_id, RowStatus.OK, None)
        allowed_V = np.ones(vocab_size, np.bool_)
        if request.allowed_mW is not None:
            allowed_V = unpacked(request.allowed_mW[place], vocab_size)
        if len(sampling.allowed):
            allowed_V &= np.isin(np.arange(vocab_size), sampling.allowed)
        allowed_V = without(allowed_V, sampling.bans(len(request.output_token_ids) + place))
        if not allowed_V.any():
            return SampledRow(-1, RowStatus.EMPTY, None)
        if not allowed_V[token_id]:
            token_id = by_hash(token_id, tokens_of(allowed_V), request.token_index + place, sampling.params, 0)
        return SampledRow(token_id, RowStatus.OK, None)

    def _write(self, step: ScheduledStep, number: int, ids: NDArray[np.int64]) -> None:
        cached = int(step.cached_R[number])
        positions = np.arange(cached, cached + len(ids))
        blocks = step.block_table_RB[number][positions // self._block_size]
        if not blocks.all():
            raise InvariantError(f"request {step.sequences[number].request_id} writes positions without a block")
        before = self._history(step, number, cached)
        wanted = before[::-1][: step.history_RG.shape[1]]
        if not np.array_equal(step.history_RG[number][: len(wanted)], wanted):
            raise InvariantError(f"request {step.sequences[number].request_id} was given the wrong look-back")
        self._blocks_NP[blocks, positions % self._block_size] = ids
        kept = positions[-self._ring :]
        self._rings_ZP[step.state_slot_R[number], kept % self._ring] = ids[-self._ring :]

    def _history(self, step: ScheduledStep, number: int, length: int) -> NDArray[np.int64]:
        blocks = step.block_table_RB[number][: -(-length // self._block_size)]
        ids: NDArray[np.int64] = self._blocks_NP[blocks].reshape(-1)[:length]
        return ids

    def _read(self, step: ScheduledStep, number: int, length: int) -> int:
        ids = self._history(step, number, length)
        window = np.arange(max(0, len(ids) - self._config.sliding_window), len(ids))
        in_ring = self._rings_ZP[step.state_slot_R[number], window % self._ring]
        return self._rule.token(ids, in_ring)


class ShadowRule:
    """Which token follows a history, and the histories themselves (`deepinfer.sim.truth.Foretelling`)."""

    def __init__(self, vocab_size: int, window: int, end_token_id: int, end_one_in: int) -> None:
        self.window = window
        self._vocab_size = vocab_size
        self._end_token_id = end_token_id
        self._end_one_in = end_one_in

    def token(self, ids: NDArray[np.int64], in_window: NDArray[np.int64]) -> int:
        """Return the token after ``ids``, whose last ones were read as ``in_window`` from the ring."""
        start = len(ids) - len(in_window)
        digest = int(_mixed(ids, 0).sum(dtype=np.uint64)) ^ int(
            (_mixed(in_window, start) ^ _WINDOW_SALT).sum(dtype=np.uint64)
        )
        value = (digest * 0x9E3779B97F4A7C15 & (2**64 - 1)) >> 20
        if self._end_one_in and value % self._end_one_in == 0:
            return self._end_token_id
        token = value // max(self._end_one_in, 1) % (self._vocab_size - 1)
        return token if token < self._end_token_id else token + 1

    def history(self, config: ModelConfig) -> ShadowHistory:  # noqa: ARG002  # the rule knows all that it needs
        """Return an empty history."""
        return ShadowHistory(self, [])


class ShadowHistory:
    """A request's ids in a plain list."""

    def __init__(self, rule: ShadowRule, ids: list[int]) -> None:
        self._rule = rule
        self._ids = ids

    def extend(self, ids: Sequence[int]) -> None:
        """Append tokens."""
        self._ids.extend(ids)

    def next_token(self) -> int:
        """Return the token that follows."""
        ids = np.array(self._ids, np.int64)
        return self._rule.token(ids, ids[-self._rule.window :])

    def copy(self) -> Self:
        """Return an independent history that continues from here."""
        return type(self)(self._rule, list(self._ids))


def build_shadow_engine(config: ModelConfig, scenario: Scenario, compiler: FormCompiler) -> tuple[Engine, Foreteller]:
    """Return an engine whose worker is a shadow, and who foretells its tokens."""
    options = scenario.options
    driver = registry.load("null")()
    layout = CacheLayout.from_config(
        config,
        derive_roles(config),
        block_size=options.block_size,
        backtrack=options.backtrack,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    pools = plan_pools(options, layout, driver.memory(), config.max_position_embeddings)
    rule = ShadowRule(config.vocab_size, config.sliding_window, config.eos_token_id, scenario.end_one_in)
    foreteller = Foreteller(rule, config, by_hash)
    worker = ShadowWorker(config, layout, pools, rule, foreteller, drafts=options.num_speculative_tokens)
    if scenario.verifies_by_lot:
        worker.lengths = ErraticLengths()
    plan = plan_ops(driver, options, Settings())
    stream = driver.new_stream() if options.async_scheduling else None
    scheduling = scheduler_config(config, options, pools)
    engine = Engine(config, options, pools, scheduling, worker, plan, None, stream, make_compiler=lambda: compiler)
    return engine, foreteller


def _with_drafts(step: ScheduledStep, drafts_R: NDArray[np.int64]) -> ScheduledStep:
    """Return a copy of a step whose requests have one row, that of their newest token, and so many more."""
    handed = replace(step)
    handed.hand_out(drafts_R)
    first_R = np.cumsum(step.q_R) - step.q_R
    rows = [[step.input_ids_T[first], *[NO_TOKEN] * drafts] for first, drafts in zip(first_R, drafts_R, strict=True)]
    handed.input_ids_T = np.concatenate(rows).astype(np.int64)
    return handed


def _mixed(ids: NDArray[np.int64], start: int) -> NDArray[np.uint64]:
    places = np.arange(start, start + len(ids), dtype=np.uint64) * _POSITION_STRIDE
    value = ids.astype(np.uint64) + places + np.uint64(1)
    value ^= value >> np.uint64(30)
    value *= _FIRST_MULTIPLIER
    value ^= value >> np.uint64(27)
    value *= _SECOND_MULTIPLIER
    return value ^ (value >> np.uint64(31))
