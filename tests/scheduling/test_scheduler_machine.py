"""Random lives of a scheduler against a plain model: who should own what, and which tokens each request must get.

After every call all books are checked. The bench's worker remembers which position lies in which memory, so a block
or slot that serves two owners, or a copy that is missing, shows as a wrong token. Raise the number of lives by hand:
DEEPINFER_TEST_MACHINE_EXAMPLES=2000.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from deepinfer.errors import DuplicateRequestError
from deepinfer.scheduling.commit import RowFailure
from deepinfer.scheduling.sequence import StopRules
from deepinfer.scheduling.states import Place, Status

MAX_EXAMPLES = int(os.environ.get("DEEPINFER_TEST_MACHINE_EXAMPLES", "60"))
MAX_MODEL_LEN = 48
BLOCK_SIZE = 4


def machine(
    make_bench: Callable[..., Any], reference: Callable[[Iterable[int], int], list[int]]
) -> type[RuleBasedStateMachine]:
    class SchedulerMachine(RuleBasedStateMachine):
        @initialize(
            usable_blocks=st.integers(12, 40),
            seats=st.integers(1, 5),
            slots=st.integers(1, 7),
            budget=st.integers(8, 40),
            interval=st.sampled_from([1, 3, 70]),
            is_chunked=st.booleans(),
            stops_preempted=st.booleans(),
            watermark=st.sampled_from([0.5, 0.9, 1.0]),
            min_chunk=st.integers(1, 8),
            align=st.sampled_from([1, 2, 4]),
            drafts=st.integers(0, 5),
            is_async=st.booleans(),
        )
        def start(
            self,
            usable_blocks: int,
            seats: int,
            slots: int,
            budget: int,
            interval: int,
            is_chunked: bool,  # noqa: FBT001
            stops_preempted: bool,  # noqa: FBT001
            watermark: float,
            min_chunk: int,
            align: int,
            drafts: int,
            is_async: bool,  # noqa: FBT001
        ) -> None:
            self.bench = make_bench(
                num_blocks=usable_blocks + 1,
                max_num_seqs=seats,
                num_state_slots=slots + 1,
                max_num_batched_tokens=budget,
                prefill_attempt_interval=interval,
                prefill_any_attempt_interval=interval,
                enable_chunked_prefill=is_chunked,
                stop_preempted_requests=stops_preempted,
                cache_usage_watermark=watermark,
                min_chunk_tokens=min_chunk,
                chunk_align=align,
                num_speculative_tokens=drafts,
                async_scheduling=is_async,
                max_model_len=MAX_MODEL_LEN,
                block_size=BLOCK_SIZE,
            )
            self.scheduler = self.bench.scheduler
            self.requests: dict[str, Any] = {}
            self.number = 0
            self.in_flight: Any = None
            self.idle_schedules = 0

        # --- requests come and go ------------------------------------------------------------------------------

        @precondition(lambda self: len(self.requests) < 12)
        @rule(length=st.integers(1, MAX_MODEL_LEN + 2), max_tokens=st.integers(1, 30), data=st.data())
        def add(self, length: int, max_tokens: int, data: st.DataObject) -> None:
            edges = sorted(data.draw(st.sets(st.integers(0, length), max_size=2)))
            spans = [tuple(edges)] if len(edges) == 2 else []
            stops = frozenset(data.draw(st.sets(st.integers(2, 100), max_size=3)))
            name = f"r{self.number}"
            self.number += 1
            self.requests[name] = self.bench.add(
                name, length, max_tokens=max_tokens, image_spans=spans, stop_token_ids=stops
            )

        @precondition(lambda self: len(self.requests) < 12 and self.scheduler.has_unfinished())
        @rule(data=st.data(), max_tokens=st.integers(1, 20))
        def fork(self, data: st.DataObject, max_tokens: int) -> None:
            parent = data.draw(st.sampled_from(self.alive()))
            name = f"f{self.number}"
            self.number += 1
            history = parent.token_ids(0, parent.length).tolist()
            self.requests[name] = self.scheduler.fork(parent.request_id, name, StopRules(max_tokens))
            assert self.requests[name].prompt_token_ids.tolist() == history

        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from([*self.requests, "nobody"]))
            was_alive = self.scheduler.find(name) is not None
            assert self.scheduler.abort(name) is was_alive
            assert self.scheduler.abort(name) is False

        @precondition(lambda self: self.scheduler.has_unfinished())
        @rule(data=st.data())
        def add_a_live_id(self, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(self.alive())).request_id
            with pytest.raises(DuplicateRequestError):
                self.bench.add(name, 3)

        @precondition(lambda self: self.scheduler.has_unfinished())
        @rule(data=st.data())
        def stop_string(self, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(self.alive())).request_id
            assert self.scheduler.finish(name, Status.FINISHED_STOPPED, "END")

        # --- steps ---------------------------------------------------------------------------------------------

        @precondition(lambda self: self.in_flight is None)
        @rule()
        def schedule(self) -> None:
            unfinished = self.scheduler.has_unfinished()
            ended = len(self.scheduler.roster._ended)
            flies = self.bench.in_flight is not None
            step = self.scheduler.schedule(self.bench.settle)
            if step.kind == "empty":
                # Bounded progress: with work to do, a step without rows has ended a request at least, or a step in
                # flight will.
                assert not unfinished or flies or len(self.scheduler.roster._ended) > ended
                self.bench.settle()
                return
            self.in_flight = step
            self.sampled = self.bench.worker.run(step)

        @precondition(lambda self: self.in_flight is not None)
        @rule(data=st.data(), has_failures=st.integers(0, 9))
        def commit(self, data: st.DataObject, has_failures: int) -> None:
            step, self.in_flight = self.in_flight, None
            failures = {}
            if has_failures == 0:
                row = data.draw(st.integers(0, step.num_requests - 1))
                failures[row] = RowFailure(Status.FINISHED_INVALID, "NaN")
            sampled = self.sampled

            def commit() -> None:
                result = self.bench.commit(step, sampled, failures)
                assert not (result.is_emitted_R & step.is_partial_R).any()

            self.bench.land(step, commit)

        @precondition(lambda self: self.in_flight is not None)
        @rule(spares_older=st.booleans())
        def cancel(self, spares_older: bool) -> None:  # noqa: FBT001
            step, self.in_flight = self.in_flight, None
            if self.bench.in_flight is not None and not spares_older:
                (older, _), self.bench.in_flight = self.bench.in_flight, None
                self.scheduler.cancel(older)
            self.scheduler.cancel(step)

        @precondition(lambda self: self.in_flight is None and self.scheduler.has_unfinished())
        @rule(count=st.integers(1, 12))
        def run(self, count: int) -> None:
            for _ in range(count):
                self.bench.step()

        # --- what must always hold -----------------------------------------------------------------------------

        def alive(self) -> list[Any]:
            return sorted(self.scheduler.roster, key=lambda sequence: sequence.arrival)

        @invariant()
        def books_agree_with_the_owners(self) -> None:
            if not hasattr(self, "scheduler"):
                return
            self.scheduler.check_invariants()
            owners: dict[int, list[str]] = {}
            for sequence in self.alive():
                assert sequence.num_blocks * BLOCK_SIZE >= sequence.num_tokens
                for block in sequence.block_table.tolist():
                    owners.setdefault(block, []).append(sequence.request_id)
            usable = self.scheduler.memory.blocks.num_usable
            pinned = set(self.scheduler.memory.block_copies.sources) - set(owners)
            held = self.scheduler.memory.flights.held
            pinned |= set(held.blocks) - set(owners)
            assert self.scheduler.free_blocks == usable - len(owners) - len(pinned)
            slots = {sequence.state_slot for sequence in self.alive() if sequence.state_slot}
            pinned_slots = {*self.scheduler.memory.slot_copies.sources, *held.slots} - slots
            assert self.scheduler.free_state_slots == self.scheduler.memory.slots.num_usable - len(slots | pinned_slots)
            assert self.scheduler.num_running <= self.scheduler.config.max_num_seqs

        @invariant()
        def every_request_is_alive_or_has_one_record(self) -> None:
            if not hasattr(self, "scheduler"):
                return
            self.bench.take_terminals()
            for name, sequence in self.requests.items():
                assert (self.scheduler.find(name) is None) == (name in self.bench.terminals)
                assert (sequence.place is Place.NOWHERE) == sequence.status.is_finished

        @invariant()
        def every_token_is_the_one_the_request_gets_alone(self) -> None:
            if not hasattr(self, "scheduler"):
                return
            for name, made in self.bench.emitted.items():
                assert made == reference(self.requests[name].prompt_token_ids.tolist(), len(made))

        def teardown(self) -> None:
            if not hasattr(self, "bench"):
                return
            if self.in_flight is not None:
                step, sampled = self.in_flight, self.sampled
                self.bench.land(step, lambda: self.bench.commit(step, sampled, {}))
            # Bounded wait: nobody can need more than its positions, its tokens, and as many again per preemption.
            self.bench.drain(limit=2_000)
            for name, sequence in self.requests.items():
                record = self.bench.terminals[name]
                if record.finish_reason == "length":
                    limit = min(sequence.stop_rules.max_tokens, MAX_MODEL_LEN + 1 - sequence.num_prompt_tokens)
                    assert len(record.output_token_ids) == limit
                elif record.finish_reason == "stop" and record.stop_reason != "END":
                    assert record.output_token_ids[-1] in sequence.stop_rules.stop_token_ids

    return SchedulerMachine


def test_random_lives_keep_every_rule(
    make_bench: Callable[..., Any], reference: Callable[[Iterable[int], int], list[int]]
) -> None:
    run_state_machine_as_test(
        machine(make_bench, reference),
        settings=settings(max_examples=MAX_EXAMPLES, stateful_step_count=40, deadline=None),
    )
