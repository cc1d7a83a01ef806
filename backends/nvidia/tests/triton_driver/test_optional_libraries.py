"""Call sites of FlashMLA and DeepGEMM against stubs with their documented signatures, which compute what they are told.

The stubs read wherever an index points to, as the libraries do: an index that was not sanitised reads garbage or fails.
"""

from __future__ import annotations

import dataclasses
import types
from pathlib import Path

import pytest
import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.batch import StepLayout
from deepinfer.accelerator.caches import EntryCache, WindowCache
from deepinfer.accelerator.ops.attention import LongRange
from deepinfer.accelerator.weights import StoredWeight
from deepinfer.errors import DriverUnavailableError
from deepinfer.numerics import LongRangeRecord, WindowRecord
from deepinfer_cpu_ref import Driver as CpuRef
from deepinfer_nvidia import assembly, optional
from deepinfer_nvidia.deep_gemm import DeepGemmLinear, packed_scales
from deepinfer_nvidia.flash_mla import FlashMlaAttention, entry_places

SERVED = OpOptions(activation_dtype=torch.bfloat16, numerics="served")
HEADS, WIDTH, RING, WINDOW = 64, 512, 12, 8
WINDOW_FORMAT, ENTRY_FORMAT = WindowRecord(WIDTH), LongRangeRecord(WIDTH)


def flash_mla_stub(calls):
    """The two functions, with the parameters that native-providers.md lists and no others."""

    def get_mla_metadata():
        meta = object()
        calls.append(meta)
        return meta

    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table=None,
        cache_seqlens=None,
        head_dim_v=512,
        sched_meta=None,
        softmax_scale=None,
        indices=None,
        attn_sink=None,
        extra_k_cache=None,
        extra_indices_in_kvcache=None,
        topk_length=None,
        extra_topk_length=None,
        enable_batch_invariant=None,
    ):
        rows, per_row, heads, width = q.shape
        assert q.dtype == torch.bfloat16
        assert (per_row, heads, width, head_dim_v) == (1, HEADS, WIDTH, 512)
        assert k_cache.shape[2:] == (1, 528)
        assert sched_meta is calls[-1], "schedules go stale: a new one for each call"
        calls.append("used")
        pools = [(k_cache, indices, topk_length, WINDOW_FORMAT)]
        if extra_k_cache is not None:
            assert extra_k_cache.shape[2:] == (1, 288)
            pools.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length, ENTRY_FORMAT))
        out = torch.empty(rows, 1, heads, width, dtype=torch.bfloat16)
        for row in range(rows):
            keys = []
            for cache, places, lengths, record in pools:
                assert places.dtype == lengths.dtype == torch.int32
                wanted = places[row, 0, : int(lengths[row])].long()
                wanted = wanted[wanted != -1]
                page = cache.shape[1]
                assert bool((wanted >= 0).all()), "only -1 is skipped"
                keys.append(record.decode(cache[wanted // page, wanted % page, 0].contiguous()))
            keys = torch.cat(keys)
            score = q[row, 0].float() @ keys.T * softmax_scale
            largest = torch.cat([score, attn_sink[:, None]], 1).amax(1, keepdim=True)
            weight = (score - largest).exp()
            total = weight.sum(1, keepdim=True) + (attn_sink[:, None] - largest).exp()
            value = weight.to(torch.bfloat16).float() @ keys / total
            out[row, 0] = value if len(keys) else float("nan")
        return out, torch.zeros(rows, heads, 1)

    return types.SimpleNamespace(get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache)


@pytest.fixture
def draws():
    return torch.Generator().manual_seed(1)


def decode_step():
    """Two requests of 1 and 2 rows, the second one's first position truncated, then a padding row."""
    return StepLayout(
        kind="decode",
        block_size=16,
        ring=RING,
        row_starts_R1=torch.tensor([0, 1, 3, 4]),
        cached_R=torch.tensor([20, 9, 0]),
        state_slots_R=torch.tensor([2, 1, 0]),
        block_table_RB=torch.tensor([[3, 1], [2, 0], [0, 0]]),
        request_T=torch.tensor([0, 1, 1, 2]),
        position_T=torch.tensor([20, 9, 10, 0]),
        window_start_R=torch.tensor([0, 6, 0]),
        image_T=torch.zeros(4, dtype=torch.bool),
        valid_T=torch.tensor([True, True, True, False]),
        max_position=21,
        max_rows=2,
    )


def call(draws):
    def normal(*shape):
        return torch.randn(shape, generator=draws)

    window = WindowCache(WINDOW_FORMAT.encode(normal(3, RING, WIDTH)), WINDOW_FORMAT)
    cache = EntryCache(ENTRY_FORMAT.encode(normal(4, 8, WIDTH)), ENTRY_FORMAT, ratio=2)
    entries = torch.tensor([[0, 9, -1, 4], [-1, 2, 0, -1], [4, 1, -1, -1], [-1, -1, -1, -1]])
    step = decode_step()
    places = step.state_slots_R[step.request_T], step.position_T % RING
    own = window.bytes_ZRb[places].clone()
    query = normal(4, HEADS, WIDTH).to(torch.bfloat16)
    return query, own, window, LongRange(cache, entries), normal(HEADS), WINDOW, step


def test_flash_mla_gets_the_records_that_the_contract_means(draws):
    calls = []
    arguments = call(draws)
    attention = FlashMlaAttention(flash_mla_stub(calls), SERVED, own=None)
    found = attention.sparse(*arguments)
    wanted = CpuRef().op_groups(SERVED)["attention"].sparse(*arguments)
    torch.testing.assert_close(found[:3].float(), wanted[:3].float(), atol=2e-2, rtol=2e-2)
    assert torch.equal(found[3], torch.zeros(HEADS, WIDTH, dtype=torch.bfloat16)), "a row without keys is zero"
    attention.sparse(*arguments[:3], None, *arguments[4:])
    assert calls.count("used") == 2


def test_indices_beyond_a_table_a_pool_or_what_a_row_sees_become_minus_one():
    cache = EntryCache(torch.zeros(4, 8, 288, dtype=torch.uint8), ENTRY_FORMAT, ratio=2)
    step = dataclasses.replace(decode_step(), block_table_RB=torch.tensor([[3, 9], [2, -1], [0, 0]]))
    entries = torch.tensor([[9, 10, 99, -5], [5, 4, -1, 7], [0, 8, 5, 4], [0, 0, 0, 0]])
    assert entry_places(cache, entries, step).tolist() == [
        [-1, -1, -1, -1],  # block 9 is beyond the pool, entry 10 not complete, 99 beyond the table
        [-1, 20, -1, -1],
        [16, -1, -1, 20],
        [-1, -1, -1, -1],
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "prefill"},
        {"numerics": "portable"},
        {"dtype": torch.float32},
    ],
)
def test_what_flash_mla_cannot_compute_stays_with_our_kernels(draws, change):
    class Own:
        def sparse(self, *arguments):
            return "ours"

    query, own, window, long_range, sinks, size, step = call(draws)
    step = dataclasses.replace(step, kind=change.get("kind", step.kind))
    options = dataclasses.replace(SERVED, numerics=change.get("numerics", "served"))
    attention = FlashMlaAttention(flash_mla_stub([]), options, Own())
    query = query.to(change.get("dtype", query.dtype))
    assert attention.sparse(query, own, window, long_range, sinks, size, step) == "ours"


def deep_gemm_stub(calls):
    def use_deterministic_algorithms(value):
        calls.append(("deterministic", value))

    def scales(packed, columns):
        rows, packs = packed.shape
        assert packed.dtype == torch.int32
        assert packed.stride(0) == 1, "rows lie side by side"
        assert packed.stride(1) % 4 == 0, "a column starts at a multiple of 16 bytes"
        codes = packed.contiguous().view(torch.uint8).view(rows, packs * 4)
        return torch.pow(2.0, codes.float() - 127).repeat_interleave(32, 1)[:, :columns]

    def fp8_fp4_gemm_nt(a, b, d, c=None, recipe=None):
        assert recipe == (1, 1, 32)
        assert c is None
        (x, x_scales), (w, w_scales) = a, b
        assert x.dtype == w.dtype == torch.float8_e4m3fn
        exact = (x.float() * scales(x_scales, x.shape[1])) @ (w.float() * scales(w_scales, w.shape[1])).T
        d.copy_(exact)
        calls.append("product")

    return types.SimpleNamespace(
        use_deterministic_algorithms=use_deterministic_algorithms, fp8_fp4_gemm_nt=fp8_fp4_gemm_nt
    )


def fp8_weight(draws, rows, columns):
    codes = torch.randn(rows, columns, generator=draws).to(torch.float8_e4m3fn)
    scale = torch.randint(120, 131, (-(-rows // 32), columns // 32), generator=draws, dtype=torch.uint8)
    return StoredWeight("w", "fp8_block32", codes, scale.view(torch.float8_e8m0fnu), rows, columns)


def test_deep_gemm_multiplies_the_contracts_codes_and_scales(draws, session):
    calls = []
    linear = DeepGemmLinear(deep_gemm_stub(calls), SERVED, own=None)
    stored = fp8_weight(draws, 70, 256)
    x = torch.randn(5, 256, generator=draws).to(torch.bfloat16)
    reference = CpuRef().op_groups(SERVED)["linear"]
    wanted = reference.dense(x, reference.prepare(stored))
    found = linear.dense(x, linear.prepare(stored))
    torch.testing.assert_close(found.float(), wanted.float(), atol=1e-2, rtol=1e-2)
    assert calls == [("deterministic", True), "product"]
    assert linear.dense(x[:0], linear.prepare(stored)).shape == (0, 70)


def test_weights_that_deep_gemm_does_not_take_stay_with_our_kernels(draws):
    class Own:
        def prepare(self, stored, precision):
            return (stored.in_features, precision)

        def dense(self, x, weight):
            return weight

    linear = DeepGemmLinear(deep_gemm_stub([]), SERVED, Own())
    for stored, precision in ((fp8_weight(draws, 32, 96), "activation"), (fp8_weight(draws, 32, 128), "float32")):
        assert linear.dense(None, linear.prepare(stored, precision)) == (stored.in_features, precision)


def test_scales_are_packed_four_in_an_integer():
    scales = torch.arange(5 * 8, dtype=torch.uint8).view(5, 8)
    packed = packed_scales(scales)
    assert packed.stride() == (1, 8)
    assert packed[2, 1] == int.from_bytes(bytes(scales[2, 4:8].tolist()), "little")


@pytest.mark.parametrize("library", list(optional.LIBRARIES.values()), ids=lambda each: each.name)
def test_a_library_that_lacks_what_is_called_is_refused_by_name(library):
    lacking = types.SimpleNamespace(**dict.fromkeys(library.symbols[1:]))
    with pytest.raises(DriverUnavailableError, match=f"has no {library.symbols[0]}"):
        optional.require_symbols(lacking, library)


def test_libraries_that_are_not_named_serve_nothing():
    own = {"attention": object(), "linear": object()}
    assert assembly.with_libraries(own, SERVED, ()) == own


def test_a_library_that_is_installed_is_reported_and_named_in_the_plan_where_it_serves(monkeypatch):
    found = optional.installed_libraries(lambda module: module == "flash_mla")
    assert [each.provider for each in found] == ["flash_mla of unknown version"]
    claims = assembly.Claims(assembly.TRITON, graphs=True, collectives=()).capabilities(
        dict.fromkeys(optional.FLASH_MLA.ops, "flash_mla 1.0.0")
    )
    assert claims.ops["attention.sparse"].provider == "flash_mla 1.0.0"
    assert claims.ops["norm.rms"].provider == "triton"


def test_the_readme_names_every_library():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert all(library.module in text for library in optional.LIBRARIES.values())
