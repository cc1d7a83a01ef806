"""What nobody has written, or what was disowned, never reaches a result; what others own is never touched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer.accelerator.interface import OpOptions

INVARIANT = OpOptions(batch_invariant=True)
BenchMaker = Callable[..., Any]


@pytest.fixture(scope="module")
def ids(golden: dict[str, Tensor]) -> list[int]:
    return golden["ids"].tolist()


LIFE = 32


def eventful_life(bench: Any, ids: list[int]) -> Tensor:
    """Chunks, decode, rejected drafts and padding rows, every disowned byte overwritten before every step."""
    request, neighbour = bench.admit(ids[:LIFE]), bench.admit(ids[10:40])
    logits = []
    for rows in (3, 9, 1, 13):
        bench.poison(request)
        bench.poison(neighbour)
        work = [(neighbour, 2), (request, rows)]
        logits.append(bench.logits("prefill", work, padding_rows=2)[2:])
    while request.cached < LIFE:
        bench.poison(request)
        right = request.ids
        request.ids = [*right[: request.cached + 1], *(511 - token for token in right[request.cached + 1 :])]
        drafted = min(4, LIFE - request.cached)
        bench.logits("decode", [(request, drafted)], commit=False)  # every row but the first will be rejected
        request.ids = right
        # The rejected rows stay: nobody cleans up after them.
        logits.append(bench.logits("decode", [(request, 1)], padding_rows=1))
    return torch.cat(logits)


def test_contents_of_unowned_memory_change_no_bit(
    bench_of: BenchMaker, ids: list[int], alone_logits: Callable[[OpOptions, int], Tensor]
) -> None:
    expected = alone_logits(INVARIANT, LIFE)
    for fill in ("nan", "large", "zeros"):
        assert torch.equal(eventful_life(bench_of(options=INVARIANT, fill=fill), ids), expected), fill


def test_contents_of_unowned_memory_change_nothing_in_the_default_mode(bench_of: BenchMaker, ids: list[int]) -> None:
    options = OpOptions(kv_cache_dtype="float32")
    lives = [eventful_life(bench_of(options=options, fill=fill), ids) for fill in ("nan", "large", "zeros")]
    assert torch.equal(lives[0], lives[1])
    assert torch.equal(lives[0], lives[2])


def test_a_pool_of_one_request_serves_one_after_another(bench_of: BenchMaker, ids: list[int]) -> None:
    """The next owner finds the last one's bytes, not zeros."""
    prompts = [ids[start : start + length] for start, length in ((0, 32), (7, 3), (20, 31), (3, 2), (11, 24), (0, 32))]
    shared = bench_of(options=INVARIANT, num_blocks=5, num_slots=2)
    fresh = bench_of(options=INVARIANT)
    expected = fresh.prefill_together([fresh.admit(prompt) for prompt in prompts], [(len(p),) for p in prompts])
    for prompt, reference in zip(prompts, expected, strict=True):
        request = shared.admit(prompt)
        first = len(prompt) // 2
        chunks = [first, len(prompt) - first - 1] if len(prompt) > 2 else [1]
        logits = torch.cat([shared.prefill(request, chunks), shared.decode(request, 1)])
        assert torch.equal(logits, reference)
        shared.release(request)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_step_writes_only_memory_of_its_requests(bench_of: BenchMaker, ids: list[int], kind: str) -> None:
    bench = bench_of()
    request, bystander = bench.admit(ids[:30]), bench.admit(ids[5:35])
    bench.prefill(request, [13])
    bench.prefill(bystander, [17])
    blocks, slots = bench.pools.block_bytes_Nb, bench.pools.slot_bytes_Zb
    before_blocks, before_slots = blocks.clone(), slots.clone()
    bench.logits(kind, [(request, 4)], padding_rows=3)
    changed_blocks = (blocks != before_blocks).any(1).nonzero().flatten().tolist()
    changed_slots = (slots != before_slots).any(1).nonzero().flatten().tolist()
    assert set(changed_blocks) <= {request.blocks[1], request.blocks[2]}
    assert changed_blocks
    assert changed_slots == [request.state_slot]
