"""A bench for the scheduler: a worker that computes no network, but remembers in which memory each position lies.

The token after a history is a function of a digest of that history alone, and the digest of a position is computed
from what the worker finds in the block of the position before it. Memory starts poisoned and is never cleaned. So
any mistake about who owns which block or slot, which copy comes first, or which positions are ready, ends as an
error here or as a wrong token.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from deepinfer.scheduling.config import SchedulerConfig
from deepinfer.scheduling.decode import DraftLengths
from deepinfer.scheduling.scheduler import Scheduler
from deepinfer.scheduling.sequence import Sequence, StopRules
from deepinfer.scheduling.step import ScheduledStep, StepCommit, TerminalRecord

VOCABULARY = 101
WINDOW = 8
EOS = 1


def digest_after(digest: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(8, "little", signed=True), digest)


def next_token(digest: int) -> int:
    """Any id but the end token, which only a stop rule's own test asks for."""
    return 2 + digest % (VOCABULARY - 2)


def reference_outputs(prompt: Iterable[int], count: int) -> list[int]:
    """What a request gets that runs alone, in one piece, for ``count`` tokens."""
    digest = 0
    for token_id in prompt:
        digest = digest_after(digest, int(token_id))
    outputs = []
    for _ in range(count):
        outputs.append(next_token(digest))
        digest = digest_after(digest, outputs[-1])
    return outputs


def mixed_drafts(request_id: str, position: int) -> bool:
    """Say whether the draft at a position is the right one: two of three are."""
    return zlib.crc32(f"{request_id}:{position}".encode()) % 3 != 0


class TapeWorker:
    """Runs steps on remembered memory: a digest per position in the blocks, and a ring of digests per state slot."""

    def __init__(self, config: SchedulerConfig, is_right: Callable[[str, int], bool], *, varies: bool = False) -> None:
        self.config = config
        self.ring = WINDOW + config.num_speculative_tokens + 1
        self.is_right = is_right
        self.varies = varies
        self.blocks: dict[tuple[int, int], int] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        # What the next step of each slot begins with: positions that are computed, and the newest token.
        self.progress: dict[int, tuple[int, int]] = {}

    def run(self, step: ScheduledStep) -> list[Any]:
        """Return the token of each row; with drafts in the engine, its run of tokens."""
        self._copy(step)
        runs = []
        first = 0
        for index in range(step.num_requests):
            q = int(step.q_R[index])
            runs.append(self._run_row(step, index, step.input_ids_T[first : first + q].tolist()))
            first += q
        assert first == step.num_tokens
        return runs if self.config.num_speculative_tokens else [token_id for [token_id] in runs]

    def _copy(self, step: ScheduledStep) -> None:
        sources = [pair.source for pair in step.block_copies]
        assert not set(sources) & {pair.destination for pair in step.block_copies}
        for pair in step.block_copies:
            for offset in range(self.config.block_size):
                self._move(self.blocks, (pair.source, offset), (pair.destination, offset))
        for pair in step.slot_copies:
            for column in range(self.ring):
                self._move(self.slots, (pair.source, column), (pair.destination, column))

    @staticmethod
    def _move(memory: dict[Any, Any], source: tuple[int, int], destination: tuple[int, int]) -> None:
        memory.pop(destination, None)
        if source in memory:
            memory[destination] = memory[source]

    def _run_row(self, step: ScheduledStep, index: int, input_ids: list[int]) -> list[int]:
        cached, q, k = int(step.cached_R[index]), int(step.q_R[index]), int(step.k_R[index])
        slot = int(step.state_slot_R[index])
        table = step.block_table_RB[index].tolist()
        size = self.config.block_size
        assert slot != 0
        assert k == cached + q
        if step.in_flight_R[index]:
            assert input_ids == [-1] * q
            assert set(step.history_RG[index].tolist()) == {-1}
            cached, newest = self.progress[slot]
            # Where lengths vary a request owns memory for all drafts, however few rows it was planned with.
            most = max(q - 1, self.config.num_speculative_tokens if self.varies else 0)
            assert k - 1 - most - int(step.in_flight_R[index]) < cached
            input_ids = [newest, *input_ids[1:]][: max(k - cached, 0)]
            if not input_ids:  # the step before has ended it at the last position of all
                return [0]
            k = cached + len(input_ids)
        else:
            self._check_history(step.sequences[index], table, cached, step.history_RG[index].tolist())
        assert k <= self.config.max_model_len
        assert all(table[: -(-k // size)]), "a position would be written into the reserved block"
        digest = self.blocks[table[(cached - 1) // size], (cached - 1) % size] if cached else 0
        for position in range(max(cached - WINDOW + 1, 0), cached):
            remembered = (position, self.blocks[table[position // size], position % size])
            assert self.slots[slot, position % self.ring] == remembered, "the window holds another request's state"
        run: list[int] = []
        for position, token_id in zip(range(cached, k), input_ids, strict=True):
            if token_id == -1:
                assert step.kind == "decode"
                right = next_token(digest)
                is_right = self.is_right(step.sequences[index].request_id, position)
                token_id = right if is_right else 2 + (right - 1) % (VOCABULARY - 2)
                if len(run) == position - cached - 1 and is_right:
                    run.append(right)
            digest = digest_after(digest, token_id)
            self.blocks[table[position // size], position % size] = digest
            self.slots[slot, position % self.ring] = (position, digest)
        accepted = cached + len(run) if step.kind == "decode" else k - 1
        run.append(next_token(self.blocks[table[accepted // size], accepted % size]))
        self.progress[slot] = (accepted + 1, run[-1])
        return run

    def _check_history(self, sequence: Sequence, table: list[int], cached: int, nearest_first: list[int]) -> None:
        size = self.config.block_size
        for position, token_id in zip(range(cached - 1, -len(nearest_first) - 1, -1), nearest_first, strict=False):
            if position < 0 or any(span.start <= position < span.stop for span in sequence.image_spans):
                assert token_id == -1
            else:
                digest = self.blocks[table[position // size], position % size]
                assert digest_after(self._digest_before(table, position), token_id) == digest, "wrong history ids"

    def _digest_before(self, table: list[int], position: int) -> int:
        if position == 0:
            return 0
        size = self.config.block_size
        return self.blocks[table[(position - 1) // size], (position - 1) % size]


@dataclass
class Bench:
    """A scheduler, the worker it drives, and everything that it ever reported."""

    config: SchedulerConfig
    scheduler: Scheduler = field(init=False)
    worker: TapeWorker = field(init=False)
    terminals: dict[str, TerminalRecord] = field(default_factory=dict)
    emitted: dict[str, list[int]] = field(default_factory=dict)
    checks: bool = True
    in_flight: tuple[ScheduledStep, Callable[[], None]] | None = None
    is_right: Callable[[str, int], bool] = mixed_drafts
    lengths: DraftLengths | None = None

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, lengths=self.lengths)
        self.worker = TapeWorker(self.config, self.is_right, varies=self.lengths is not None)
        self.free = (self.scheduler.free_blocks, self.scheduler.free_state_slots)

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int = 16, **options: Any) -> Sequence:
        """Add a request whose prompt is a list, or so many tokens that depend on the id."""
        if isinstance(prompt, int):
            prompt = [3 + zlib.crc32(f"{request_id}/{index}".encode()) % 97 for index in range(prompt)]
        names = ("stop_token_ids", "eos_token_id", "ignore_eos")
        rules = {name: options.pop(name) for name in names if name in options}
        sequence = Sequence(request_id, prompt, StopRules(max_tokens, **rules), **options)
        self.scheduler.add(sequence)
        return sequence

    def step(
        self,
        tokens: Callable[[ScheduledStep, list[Any]], list[Any]] | None = None,
        failures: Mapping[int, Any] | None = None,
        between: Callable[[ScheduledStep], None] | None = None,
    ) -> ScheduledStep:
        """Run one step; ``tokens`` may replace what was sampled, ``between`` runs before the result is read."""
        step = self.scheduler.schedule(self.settle if self.config.async_scheduling else None)
        sampled = self.worker.run(step)
        if self.checks:
            self.scheduler.check_invariants()
        if between is not None:
            between(step)

        def commit() -> None:
            self.commit(step, sampled if tokens is None else tokens(step, sampled), failures or {})

        self.land(step, commit)
        return step

    def land(self, step: ScheduledStep, commit: Callable[[], None]) -> None:
        """Commit the step before, and this one, unless it may stay in flight."""
        self.settle()
        if step.kind == "decode" and self.config.async_scheduling:
            self.in_flight = (step, commit)
        elif step.kind != "empty" or not self.config.async_scheduling:
            commit()

    def settle(self) -> None:
        """Read and commit the step in flight, if there is one."""
        if self.in_flight is not None:
            (_, commit), self.in_flight = self.in_flight, None
            commit()

    def commit(self, step: ScheduledStep, tokens: list[Any], failures: Mapping[int, Any]) -> StepCommit:
        if self.config.num_speculative_tokens:
            result = self.scheduler.commit_runs(step, tokens, failures)
        else:
            result = self.scheduler.commit(step, np.array(tokens, dtype=np.int64), failures)
        for record in result.records():
            if record.token_id is not None:
                self.emitted.setdefault(record.request_id, []).append(record.token_id)
        self.take_terminals()
        if self.checks:
            self.scheduler.check_invariants()
        return result

    def take_terminals(self) -> None:
        for record in self.scheduler.take_terminals():
            assert record.request_id not in self.terminals, "a second terminal record"
            self.terminals[record.request_id] = record
            assert self.emitted.get(record.request_id, []) == list(record.output_token_ids)

    def drain(self, limit: int = 10_000) -> int:
        """Run to the end and return the steps it took; everything must have come back."""
        steps = 0
        while self.scheduler.has_unfinished():
            steps += 1
            assert steps <= limit, "no end in sight"
            self.step()
        self.settle()
        self.take_terminals()
        self.audit()
        return steps

    def audit(self) -> None:
        """Nothing is alive, and everything that was ever handed out is back."""
        self.scheduler.check_invariants()
        assert (self.scheduler.free_blocks, self.scheduler.free_state_slots) == self.free
        assert self.scheduler.num_waiting == self.scheduler.num_running == 0
        assert not self.scheduler.has_unfinished()

    def rows(self, step: ScheduledStep) -> list[tuple[str, int, int, int]]:
        """The rows of a step as (request id, cached, q, k)."""
        numbers = zip(step.cached_R.tolist(), step.q_R.tolist(), step.k_R.tolist(), strict=True)
        return [(sequence.request_id, *row) for sequence, row in zip(step.sequences, numbers, strict=True)]


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    """Make a bench with blocks of 4, votes at every step, and whatever the test names."""

    def make(**settings: Any) -> Bench:
        defaults = {
            "block_size": 4,
            "num_blocks": 64,
            "num_state_slots": 9,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 256,
            "prefill_attempt_interval": 1,
        }
        bench = {name: settings.pop(name) for name in ("is_right", "lengths") if name in settings}
        return Bench(SchedulerConfig(**{**defaults, **settings}), **bench)

    return make


@pytest.fixture
def reference() -> Callable[[Iterable[int], int], list[int]]:
    return reference_outputs
