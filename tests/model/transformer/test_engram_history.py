"""The look-back of Engram's hash: the same rows whatever chunks, drafts, images and padding lie between."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.interface import OpOptions
from deepinfer.accelerator.ops.memory import MemoryOps, NgramHash, NgramTable
from deepinfer.model.engram import ngram_tokens
from deepinfer.model.engram_hash import engram_rows_reference
from deepinfer.model.transformer import Transformer

BenchMaker = Callable[..., Any]


class WatchedMemory(MemoryOps):
    """Passes every call on and keeps the table rows that were asked for."""

    def __init__(self, watched: MemoryOps) -> None:
        self.watched = watched
        self.rows: list[Tensor] = []

    def ngram_rows(self, tokens_TG: Tensor, constants: NgramHash) -> Tensor:
        self.rows.append(self.watched.ngram_rows(tokens_TG, constants))
        return self.rows[-1]

    def gather_rows(self, table: NgramTable, rows_TF: Tensor) -> Tensor:
        return self.watched.gather_rows(table, rows_TF)

    def gate(self, *arguments: Any) -> Tensor:
        return self.watched.gate(*arguments)


@dataclass
class Watch:
    """A bench whose table rows are recorded."""

    bench: Any
    memory: WatchedMemory

    def take(self) -> Tensor:
        """Return what was asked for since the last call: rows of both tables [T, 2, F]."""
        rows = torch.stack([torch.cat(self.memory.rows[table::2]) for table in range(2)], dim=1)
        self.memory.rows.clear()
        return rows


@pytest.fixture
def watch(bench_of: BenchMaker) -> Watch:
    bench = bench_of(num_blocks=200, num_slots=30)
    model = bench.model
    memory = WatchedMemory(model.ops.memory)
    bench.model = Transformer(model.config, model.weights, replace(model.ops, memory=memory), model.rotary)
    return Watch(bench, memory)


def direct(watch: Watch, ids: Sequence[int], image: Sequence[bool] | None = None) -> Tensor:
    config = watch.bench.model.config
    flags = None if image is None else list(image)
    tables = [engram_rows_reference(list(ids), flags, config, table) for table in range(2)]
    return torch.from_numpy(np.stack(tables, axis=1))


def test_rows_of_the_whole_prompt_are_the_golden_ones(watch: Watch, golden: dict[str, Tensor]) -> None:
    watch.bench.prefill(watch.bench.admit(golden["ids"].tolist()), [70])
    assert torch.equal(watch.take(), golden["engram_hash"])


@pytest.mark.parametrize("chunks", [(1, 1, 1, 1, 8), (2, 10), (3, 9), (4, 8), (5, 1, 2, 3, 1)])
def test_rows_do_not_depend_on_chunks(watch: Watch, golden: dict[str, Tensor], chunks: tuple[int, ...]) -> None:
    watch.bench.prefill(watch.bench.admit(golden["ids"][:12].tolist()), chunks)
    assert torch.equal(watch.take(), golden["engram_hash"][:12])


def test_rejected_drafts_leave_no_trace(watch: Watch, golden: dict[str, Tensor]) -> None:
    bench, ids = watch.bench, golden["ids"].tolist()
    request = bench.admit(ids[:20])
    bench.prefill(request, [5])
    rows = [watch.take()]
    for accepted in (1, 2, 3, 4, 1, 2, 2):
        first_wrong = request.cached + accepted
        request.ids = ids[:first_wrong] + [511] * (20 - first_wrong)
        bench.step("decode", [(request, min(4, 20 - request.cached))], commit=False)
        rows.append(watch.take()[:accepted])
        request.cached += accepted
    assert torch.equal(torch.cat(rows), golden["engram_hash"][:20])


@pytest.mark.parametrize("cut", [19, 20, 27, 28, 30])
def test_an_image_span_is_a_barrier_across_chunks(watch: Watch, golden: dict[str, Tensor], cut: int) -> None:
    ids, image = golden["ids_image"].tolist(), golden["image_mask"].tolist()
    request = watch.bench.admit(ids, image)
    watch.bench.prefill(request, [cut, 33 - cut])
    rows = watch.take()
    assert torch.equal(rows, direct(watch, ids, image)[:33])
    assert (rows[20:27] == -1).all()


def test_neighbours_and_padding_rows_do_not_share_history(watch: Watch, golden: dict[str, Tensor]) -> None:
    bench, ids = watch.bench, golden["ids"].tolist()
    first, second = bench.admit(ids[:20]), bench.admit(ids[30:50])
    expected = (direct(watch, ids[:20]), direct(watch, ids[30:50]))
    for q_first, q_second in ((1, 3), (2, 1), (4, 2)):
        starts = first.cached, second.cached
        bench.step("prefill", [(first, q_first), (second, q_second)], padding_rows=3)
        rows = watch.take()
        assert torch.equal(rows[:q_first], expected[0][starts[0] : first.cached])
        assert torch.equal(rows[q_first : q_first + q_second], expected[1][starts[1] : second.cached])
        assert (rows[q_first + q_second :] == -1).all()


def test_ids_are_mapped_on_their_way(bench_of: BenchMaker) -> None:
    """Two requests; the map adds 100; history and rows pass through it, dead places do not."""
    step = StepLayout(
        kind="prefill",
        block_size=8,
        ring=12,
        row_starts_R1=torch.tensor([0, 2, 5]),
        cached_R=torch.tensor([2, 7]),
        state_slots_R=torch.tensor([1, 2]),
        block_table_RB=torch.tensor([[1], [2]]),
        request_T=torch.tensor([0, 0, 1, 1, 1]),
        position_T=torch.tensor([2, 3, 7, 8, 9]),
        window_start_R=torch.tensor([0, 0]),
        image_T=torch.tensor([False, False, False, True, False]),
        valid_T=torch.tensor([True] * 5),
        max_position=10,
        max_rows=3,
    )
    token_map = torch.arange(10) + 100
    history = torch.tensor([[2, 1, -1], [6, -1, 4]])
    tokens = ngram_tokens(torch.tensor([3, 4, 7, 8, 9]), history, step, token_map)
    assert tokens.tolist() == [
        [103, 102, 101, -1],
        [104, 103, 102, 101],
        [107, 106, -1, 104],
        [-1, -1, -1, -1],
        [109, -1, 107, 106],
    ]


def test_a_model_on_another_token_map_reads_other_rows(bench_of: BenchMaker, golden: dict[str, Tensor]) -> None:
    bench = bench_of(options=OpOptions(kv_cache_dtype="float32"))
    model = bench.model
    constant = replace(model.weights, token_map_V=torch.zeros(512, dtype=torch.int64))
    bench.model = Transformer(model.config, constant, model.ops, model.rotary)
    logits = bench.prefill(bench.admit(golden["ids"][:8].tolist()), [8])
    assert not torch.allclose(logits, golden["logits"][:8], atol=1e-2)
