"""Decode steps from recorded graphs: the bits of the same steps call by call, and padding that nobody notices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops import OpGroup
from deepinfer.engine.build import build_engine_on
from deepinfer.engine.engine import Engine
from deepinfer.engine.graphs.buffers import StepExtents
from deepinfer.engine.graphs.planning import RECORDED_OPS
from deepinfer.engine.graphs.trial_steps import TrialSteps
from deepinfer.engine.options import EngineOptions
from deepinfer.errors import DeterminismError
from deepinfer.settings import Settings
from deepinfer_conformance.mutants.hosts import GraphDriver
from deepinfer_cpu_ref import Driver as ReferenceDriver

Build = Callable[..., Any]
Driven = Any
SIZES: Any = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 9, "batch_invariant": True}
SEEDED = {"temperature": 1.0, "max_tokens": 3, "logprobs": 2, "ignore_eos": True}


def run(driven: Driven, batch: int, prompt_of: Callable[..., list[int]], name: str = "") -> list[Any]:
    """Tokens and log-probabilities of a batch whose requests have different lengths."""
    ids = [f"{name}{batch}-{number}" for number in range(batch)]
    for number, request_id in enumerate(ids):
        driven.add(request_id, prompt_of(4 + 3 * number, seed=number), seed=number, **SEEDED)
    driven.drain()
    return [(driven.tokens(request_id), driven.answer(request_id).logprobs) for request_id in ids]


@pytest.fixture
def both(engines: Mapping[bool, Engine], in_hand: Build) -> tuple[Driven, Driven]:
    """The same engine without and with graphs: of 1, 2, 4, 8 and 9 rows."""
    return in_hand(engines[False]), in_hand(engines[True])


@pytest.fixture(scope="module")
def engines(tiny_directory: Path) -> Mapping[bool, Engine]:
    return {
        graphs: build_engine_on(
            ReferenceDriver(), tiny_directory, EngineOptions(decode_graphs=graphs, **SIZES), Settings()
        )
        for graphs in (False, True)
    }


def test_graphs_change_no_bit_of_steps_that_are_planned_ahead(
    both: tuple[Driven, Driven], in_hand: Build, tiny_directory: Path, prompt_of: Build
) -> None:
    """What was assumed is put right in the graph's inputs, on the thread that replays it."""
    plain, _ = both
    options = EngineOptions(decode_graphs=True, async_scheduling=True, **SIZES)
    ahead = in_hand(build_engine_on(ReferenceDriver(), tiny_directory, options, Settings()))
    for batch in (1, 3, 9):
        assert run(ahead, batch, prompt_of, "ahead") == run(plain, batch, prompt_of, "plain")
    assert ahead.engine.worker.decode_steps.replays > 0
    ahead.engine.close()


def test_graphs_change_no_bit_of_any_batch_size(both: tuple[Driven, Driven], prompt_of: Build) -> None:
    """At each border of a size, and beside it."""
    plain, recorded = both
    assert recorded.engine.worker.decode_steps.sizes == (1, 2, 4, 8, 9)
    before = recorded.engine.worker.decode_steps.replays
    for batch in (1, 2, 3, 4, 5, 7, 8, 9):
        assert run(recorded, batch, prompt_of) == run(plain, batch, prompt_of)
    decodes = sum(step.kind == "decode" for step in recorded.steps)
    assert recorded.engine.worker.decode_steps.replays - before == decodes > 0
    assert plain.engine.worker.decode_steps.replays == 0


def test_padding_reads_and_writes_nothing_that_matters(both: tuple[Driven, Driven], prompt_of: Build) -> None:
    """Slot and block 0, which padding names, hold NaN before, and the same bytes afterwards."""
    plain, recorded = both
    pools = recorded.engine.worker.pools
    for pool in (pools.slot_bytes_Zb, pools.block_bytes_Nb):
        pool[0] = 255
    for batch in (3, 5, 7):
        assert run(recorded, batch, prompt_of) == run(plain, batch, prompt_of)
    assert (pools.slot_bytes_Zb[0] == 255).all()
    assert (pools.block_bytes_Nb[0] == 255).all()


def test_padding_chooses_no_expert(both: tuple[Driven, Driven], prompt_of: Build) -> None:
    recorded = both[1]
    run(recorded, 5, prompt_of)
    graph = recorded.engine.worker.decode_steps._recorded[8]
    routed = [call.result.experts_Tk for call in graph.graph.calls if call.name == "experts.route"]
    assert len(routed) == 4
    assert all((experts_Tk[:5] >= 0).all() and (experts_Tk[5:] == -1).all() for experts_Tk in routed)


def test_without_batch_invariance_graphs_change_nothing_where_they_pad_nothing(
    reference: Build, prompt_of: Build
) -> None:
    plain, recorded = (reference(max_num_seqs=8, decode_graphs=graphs) for graphs in (False, True))
    for batch in (1, 2, 4, 8):
        assert run(recorded, batch, prompt_of) == run(plain, batch, prompt_of)


def test_the_recorded_ops_are_those_whose_claims_are_asked_for(both: tuple[Driven, Driven]) -> None:
    steps = both[1].engine.worker.decode_steps
    names = {call.name for each in steps._recorded.values() for call in each.graph.calls if "aten" not in call.name}
    assert names == set(RECORDED_OPS)


def test_values_that_the_host_read_inside_of_an_op_are_found_at_start(reference: Build, drive: Build) -> None:
    """On a host that records as a device does, the reference's ops, which look at values, cannot be recorded."""
    with pytest.raises(DeterminismError, match="depends on a value that the host read while it was"):
        drive(GraphDriver(), decode_graphs=True, max_num_seqs=2, batch_invariant=True)


class RememberingDriver(ReferenceDriver):
    """Its norm looks at the first value at each address once, and believes for ever after what it saw."""

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        groups = super().op_groups(options)
        norm, seen = groups["norm"], {}
        compute = norm.rms

        def rms(x_TD: torch.Tensor, *others: Any) -> torch.Tensor:
            factor = seen.setdefault(x_TD.data_ptr(), float(x_TD[0, 0]) if len(x_TD) else 0.0)
            return compute(x_TD, *others) * (1.0 + (factor > 0))

        norm.rms = self._recorder._watched("norm.rms", rms)
        return groups


def test_values_that_an_op_remembers_are_found_at_start(drive: Build) -> None:
    with pytest.raises(DeterminismError, match=r"graph of \d rows .* gives other hidden rows"):
        drive(RememberingDriver(), decode_graphs=True, max_num_seqs=4, batch_invariant=True)


class PeekingDriver(ReferenceDriver):
    """Some of its work lies between ops, and looks at a value."""

    def op_groups(self, options: OpOptions) -> Mapping[str, OpGroup]:
        groups = super().op_groups(options)
        collapse = groups["mixing"].collapse
        groups["mixing"].collapse = lambda *arguments: collapse(*arguments) * (1 + float(arguments[0].sum() > 1e30))
        return groups


def test_values_that_are_read_between_ops_are_refused_by_name(drive: Build) -> None:
    with pytest.raises(DeterminismError, match=r"cannot record a decode step of 2 rows: aten.* between ops"):
        drive(PeekingDriver(), decode_graphs=True, max_num_seqs=2)


class ForgetfulGraph:
    """A graph that runs nothing."""

    def capture_begin(self) -> None:
        """Record nothing."""

    capture_end = replay = capture_begin


class ForgetfulDriver(ReferenceDriver):
    def new_graph(self) -> Any:
        return ForgetfulGraph()


def test_a_replay_that_runs_nothing_is_found_at_start(drive: Build) -> None:
    with pytest.raises(DeterminismError, match="hidden rows and state slots"):
        drive(ForgetfulDriver(), decode_graphs=True, max_num_seqs=2)


@pytest.mark.parametrize("blocks", [3, 64])
def test_trial_steps_own_what_they_write(reference: Build, blocks: int) -> None:
    """No two rows write to one place, also where the pool is too small for all of them."""
    driven = reference(max_num_seqs=8, num_blocks=blocks, max_model_len=8)
    worker = driven.engine.worker
    extents = StepExtents(
        rows_per_request=2,
        table_blocks=2,
        block_size=4,
        ring=worker.pools.layout.ring,
        max_position=8,
        look_back=driven.engine.config.engram_max_ngram_size,
    )
    trial = TrialSteps(worker.decode_steps, worker.pools, worker._ops, extents, vocab_size=101)
    for size in (1, 2, 3, 8, 15):
        inputs = trial(size, 3)
        layout = inputs.layout
        slots = layout.state_slots_R[layout.request_T][layout.valid_T].tolist()
        places = list(zip(slots, layout.position_T[layout.valid_T].tolist(), strict=True))
        assert len(set(places)) == len(places) > 0
        assert 0 not in slots
        owned = layout.block_table_RB[layout.block_table_RB > 0].tolist()
        assert len(set(owned)) == len(owned)
        assert max(owned) < blocks
        assert trial(size, 3).ids_T.equal(inputs.ids_T)
    assert not trial(8, 4).ids_T.equal(trial(8, 3).ids_T)


def test_the_reference_claims_every_op_that_is_recorded() -> None:
    claims = ReferenceDriver().capabilities()
    assert all(claims.ops[op].graph_safe for op in RECORDED_OPS)
