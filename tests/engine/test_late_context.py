"""Context of steps without drafts is stored late, several steps at once: no draft shows it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from deepinfer import SamplingParams
from deepinfer.engine import speculation
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.options import EngineOptions
from deepinfer.engine.round_lengths import RoundLengths
from deepinfer.engine.speculation import LATE_STEPS, ModelSpeculation
from deepinfer.engine.worker import Worker
from deepinfer.model.draft import ContextRows, DraftModel
from deepinfer.sampling.drafting import DraftPolicy
from deepinfer.settings import Settings
from deepinfer_cpu_ref import Driver

STEPS_PER_ROUND = 2 * LATE_STEPS + 3
PROMPTS = ([9, 8, 7, 6], [5, 6, 7] * 5, list(range(30, 47)))

Life = Callable[..., tuple[dict[Any, list[int]], list[int], Engine]]


@pytest.fixture
def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    """Make a round of drafts every so many steps; return the drafts of each, and the rows of each storing."""

    def run(late_steps: int, **options: Any) -> tuple[dict[Any, list[int]], list[int], Engine]:
        drafts: dict[Any, list[int]] = {}
        stored: list[int] = []
        drafted, store_rows, chosen = ModelSpeculation._round, DraftModel.store_rows, [0]
        seconds = itertools.count(1.0)

        def round_of(self: Any, step: Any, newest: Any, pools: Any) -> Any:
            made = drafted(self, step, newest, pools)
            if step.kind == "decode":
                for row, ids_n in zip(step.sequences, made.token_ids_Rn.tolist(), strict=True):
                    drafts[row.request_id, len(drafts)] = ids_n
            return made

        def storing(self: Any, rows: Any, caches: Any) -> None:
            stored.append(len(rows.slot_T))
            store_rows(self, rows, caches)

        def choose(self: Any, requests: int, curve: Any) -> int:
            chosen[0] += 1
            return 0 if chosen[0] % STEPS_PER_ROUND else 3

        with monkeypatch.context() as patched:
            patched.setattr(speculation, "LATE_STEPS", late_steps)
            patched.setattr(ModelSpeculation, "_round", round_of)
            patched.setattr(DraftModel, "store_rows", storing)
            patched.setattr(RoundLengths, "choose", choose)
            # The two lives must verify alike, and a step that was planned ahead is timed by the device's own clock.
            patched.setattr(Worker, "learn", lambda self, step, step_s, sampler_s: None)
            given = {"async_scheduling": False, "num_blocks": 40, **options}
            engine = build_engine_on(
                Driver(),
                None,
                EngineOptions(
                    num_speculative_tokens=3,
                    variable_verification=True,
                    verification="coupled",
                    batch_invariant=True,
                    max_num_seqs=4,
                    block_size=8,
                    max_num_batched_tokens=24,
                    **given,
                ),
                Settings(),
                clock=lambda: next(seconds),  # every size costs the same when it is measured at the start
            )
            for number, prompt in enumerate(PROMPTS):
                engine.add_request(str(number), prompt, SamplingParams(seed=number, max_tokens=50, ignore_eos=True))
            steps = 0
            while engine.has_unfinished_requests():
                engine.step()
                steps += 1
                if steps == 12:  # in the midst of rows that wait
                    engine.fork_request("1", "fork", SamplingParams(seed=7, max_tokens=40, ignore_eos=True))
                if steps == 14:
                    engine.abort_request("0")
                    engine.add_request("late", [3] * 9, SamplingParams(seed=9, max_tokens=40, ignore_eos=True))
                engine.check_invariants()
            return drafts, stored, engine

    return run


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True, "decode_graphs": True}, {"num_blocks": 17}],
    ids=["ahead, by graphs", "alone, short of blocks"],
)
def test_drafts_are_those_of_context_that_is_stored_at_once(life: Life, options: dict[str, Any]) -> None:
    late, stored_late, engine = life(LATE_STEPS, **options)
    at_once, stored, _ = life(1, **options)
    assert late == at_once
    assert len({request_id for request_id, _ in late}) >= 4
    assert 0 <= sum(stored) - sum(stored_late) < LATE_STEPS * 4  # what nobody read any more
    assert len(stored_late) < len(stored) / 2
    assert (engine.stats().preemptions > 0) is ("num_blocks" in options)


def test_rows_that_wait_are_stored_before_a_prompt_enters_their_slot() -> None:
    stored: list[list[int]] = []
    model = SimpleNamespace(
        ops=SimpleNamespace(sampling=None, drafting=None),
        context_rows=lambda taps_TA, layout: ContextRows(taps_TA, taps_TA[:, 0], taps_TA[:, 0]),
        store_rows=lambda rows, pools: stored.append(rows.slot_T.tolist()),
        store_context=lambda taps_TA, layout, pools: stored.append(taps_TA[:, 0].tolist()),
    )
    speculation = ModelSpeculation(cast(Any, model), DraftPolicy(), drafts=3, num_slots=4, device=torch.device("cpu"))

    def store(kind: str, rows: list[int]) -> None:
        layout = SimpleNamespace(kind=kind, rows=len(rows), cached_R=[0] * min(len(rows), 2), ring=24)
        speculation.store_context(torch.tensor(rows)[:, None], cast(Any, layout), cast(Any, None))

    store("decode", [1, 11])
    store("decode", [2, 12])
    assert stored == []
    store("prefill", [3])  # a chunk may be as short as a step without drafts
    assert stored == [[1, 11, 2, 12], [3]]
    store("decode", [4, 14])
    store("decode", [5, 15, 6, 16])  # drafts are verified
    assert stored[2:] == [[4, 14], [5, 15, 6, 16]]
