"""The null driver: what the reference returns in shape and dtype, for every op, and nothing of its work."""

from __future__ import annotations

import copy
import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from deepinfer.accelerator import OP_GROUPS, OpOptions, all_op_names, make_plan, registry
from deepinfer.accelerator.ops.drafting import DraftBlock, DraftDistributions, DraftRuns
from deepinfer.accelerator.ops.sampling import LogitAdjustments, SamplingRows, TokenEntries
from deepinfer.accelerator.weights import PreparedWeight
from deepinfer.errors import OpRefusedError
from deepinfer_conformance.drivers import NullDriver, OracleDriver
from deepinfer_conformance.drivers.faulty.tensors import same_shapes

PROMPT = list(range(3, 24))


class TwinWeight(PreparedWeight):
    def __init__(self, first: PreparedWeight, second: PreparedWeight) -> None:
        self.name, self.nbytes = first.name, first.nbytes
        self.weights = (first, second)


def side_of(value: object, side: int) -> object:
    return value.weights[side] if isinstance(value, TwinWeight) else value


class TwinDriver(registry.load("cpu_ref")):
    """cpu_ref, with a second driver called beside it on copies of the same arguments."""

    def __init__(self, second: object) -> None:
        super().__init__()
        self.second = second
        self.compared: set[str] = set()

    def op_groups(self, options: OpOptions):
        first, second = super().op_groups(options), self.second.op_groups(options)
        groups = {}
        for contract in OP_GROUPS:
            members = {}
            for name in contract.op_names():
                here = getattr(first[contract.group], name)
                has_it = contract.group in second and name in type(second[contract.group]).implemented()
                there = getattr(second[contract.group], name) if has_it else None
                members[name] = staticmethod(self._both(f"{contract.group}.{name}", here, there))
            groups[contract.group] = type(f"Twin{contract.__name__}", (contract,), members)()
        return groups

    def _both(self, op: str, here: Callable[..., object], there: Callable[..., object] | None):
        def call(*args: object, **keywords: object) -> object:
            if there is None:
                return here(*args, **keywords)
            copies = [copied(side_of(arg, 1)) for arg in args]
            second = there(*copies, **{name: copied(value) for name, value in keywords.items()})
            first = here(*[side_of(arg, 0) for arg in args], **keywords)
            self.compared.add(op)
            if isinstance(first, PreparedWeight):
                return TwinWeight(first, second)
            assert same_shapes(first, second), (op, first, second)
            return first

        return call


def copied(value: object) -> object:
    return value if isinstance(value, PreparedWeight) else copy.deepcopy(value)


def sampling_rows(rows: int) -> SamplingRows:
    return SamplingRows(
        temperature_B=torch.ones(rows, dtype=torch.float64),
        top_k_B=torch.full((rows,), 3),
        top_p_B=torch.full((rows,), 0.9, dtype=torch.float64),
        min_weight_B=torch.zeros(rows, dtype=torch.int64),
        seeds_B=torch.arange(rows),
        streams_B=torch.arange(rows),
        forced_ids_B=torch.tensor([-1, 5][:rows]),
    )


def call_what_the_model_does_not(ops, pools) -> None:
    for rows in (2, 0):
        logits, settings = torch.randn(rows, 9), sampling_rows(rows)
        bans = TokenEntries(torch.zeros(min(rows, 1), dtype=torch.int64), torch.zeros(min(rows, 1), dtype=torch.int64))
        ops.sampling.adjust(logits, LogitAdjustments(bans=bans))
        weights = ops.sampling.weigh(logits, settings)
        ops.sampling.draw(weights, ops.sampling.uniforms(settings.seeds_B, settings.streams_B))
        tokens = ops.sampling.sample(logits, settings).token_ids_B
        for count in (0, 4):
            ops.sampling.log_probabilities(logits, settings, tokens, count)
            ops.sampling.raw_log_probabilities(logits, tokens, count)
    one, two = torch.tensor([1]), torch.tensor([2])
    for pool in (pools.block_bytes_Nb, pools.slot_bytes_Zb):
        ops.moves.copy(pool, one, two)
        ops.moves.restore(pool, two, ops.moves.save(pool, one))
        ops.moves.zero(pool, two)
    slots = torch.tensor([0, -1, 7])
    ops.codec.gather_window(pools.window(0), slots)
    ops.codec.gather_entries(pools.entries(1), slots)
    ops.codec.gather_index_keys(pools.index_keys(1), slots)
    ops.experts.combine(torch.zeros(2, 128), torch.zeros(2, 2, 128))


def call_the_drafting_ops(ops, pools, dtype: torch.dtype) -> None:
    window = pools.window(0)
    width, size = window.format.width, window.format.nbytes
    for requests in (2, 0):
        zeros_R = torch.zeros(requests, dtype=torch.int64)
        block = DraftBlock(zeros_R, zeros_R, zeros_R, torch.ones(requests, dtype=torch.bool))
        query_RnHC = torch.zeros(requests, 2, 3, width, dtype=dtype)
        records_Rnb = torch.zeros(requests, 2, size, dtype=torch.uint8)
        ops.drafting.attend(query_RnHC, records_Rnb, window, torch.zeros(3), 4, block)
        logits, settings = torch.randn(requests, 9), sampling_rows(requests)
        ops.drafting.guess(logits, settings, 0.1)
        drafted = ops.drafting.propose(logits, settings, 4)
        runs = DraftRuns(torch.arange(requests), zeros_R, drafted.token_ids_B[:, None])
        kept = DraftDistributions(drafted.ids_BK[:, None], drafted.weights_BK[:, None], drafted.sums_B[:, None])
        ops.drafting.verify(logits, settings, runs, kept, settings.streams_B, settings.streams_B)
        ops.drafting.match(ops.sampling.sample(logits, settings), runs)


def call_the_parts_of_the_experts(hand) -> None:
    weights = hand.transformer.weights.layers[0].feed_forward_block.feed_forward
    x_TD = torch.zeros((3, hand.config.hidden_size), dtype=hand.plan.options.activation_dtype)
    flags_T = torch.tensor([True, False, True])
    routing = hand.plan.ops.experts.route(x_TD, weights.router, flags_T, flags_T, weights.top_k, 1.5)
    hand.plan.ops.experts.routed(x_TD, routing, weights.experts)
    hand.plan.ops.experts.shared(x_TD, weights.shared)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_op_returns_the_shapes_and_dtypes_of_the_reference(make_hand, three_layers, dtype) -> None:
    twin = TwinDriver(NullDriver())
    hand = make_hand(twin, three_layers, OpOptions(activation_dtype=dtype))
    for pool in (hand.pools.block_bytes_Nb, hand.pools.slot_bytes_Zb):
        pool.zero_()
    request = hand.request(PROMPT)
    hand.decode([request], [hand.prefill(request, [4, 17])], 2)
    call_what_the_model_does_not(hand.plan.ops, hand.pools)
    call_the_parts_of_the_experts(hand)
    call_the_drafting_ops(hand.plan.ops, hand.pools, dtype)
    assert twin.compared == set(all_op_names())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_oracle_returns_the_shapes_and_dtypes_of_the_reference_too(make_hand, three_layers, dtype) -> None:
    oracle = OracleDriver()
    twin = TwinDriver(oracle)
    hand = make_hand(twin, three_layers, OpOptions(activation_dtype=dtype))
    for pool in (hand.pools.block_bytes_Nb, hand.pools.slot_bytes_Zb):
        pool.zero_()
    request = hand.request(PROMPT)
    hand.decode([request], [hand.prefill(request, [4, 17])], 2)
    call_what_the_model_does_not(hand.plan.ops, hand.pools)
    call_the_parts_of_the_experts(hand)
    call_the_drafting_ops(hand.plan.ops, hand.pools, dtype)
    assert twin.compared == set(all_op_names()) - set(oracle.capabilities().declared_fallbacks)


def test_the_plan_needs_no_other_driver() -> None:
    plan = make_plan(NullDriver(), OpOptions())
    assert {row.driver for row in plan.rows} == {"null"}
    assert len(plan.rows) == len(all_op_names())


def test_memory_is_neither_read_nor_written(make_hand, three_layers) -> None:
    said = []
    for seed in (1, 2):
        hand = make_hand(NullDriver(), three_layers)
        hand.poison(seed)
        before = (hand.pools.block_bytes_Nb.clone(), hand.pools.slot_bytes_Zb.clone())
        request = hand.request(PROMPT)
        said += hand.decode([request], [hand.prefill(request, [4, 17])], 3)
        call_what_the_model_does_not(hand.plan.ops, hand.pools)
        call_the_drafting_ops(hand.plan.ops, hand.pools, torch.float32)
        assert torch.equal(before[0], hand.pools.block_bytes_Nb)
        assert torch.equal(before[1], hand.pools.slot_bytes_Zb)
    assert said == [[0, 0, 0, 0]] * 2


def test_the_token_is_0_unless_one_is_forced() -> None:
    sampled = make_plan(NullDriver(), OpOptions()).ops.sampling.sample(torch.randn(2, 9), sampling_rows(2))
    assert sampled.token_ids_B.tolist() == [0, 5]


def test_a_weight_of_another_driver_is_refused() -> None:
    linear = make_plan(NullDriver(), OpOptions()).ops.linear
    stranger = TwinWeight.__new__(TwinWeight)
    stranger.name = "wq"
    with pytest.raises(OpRefusedError, match=r"'wq' was prepared by TwinWeight"):
        linear.dense(torch.zeros(1, 2), stranger)


@pytest.mark.parametrize("name", ["null", "oracle", "faulty"])
def test_each_test_driver_is_registered_and_starts(name) -> None:
    driver_class = registry.load(name)
    assert driver_class.availability().available
    driver = driver_class()
    assert driver.name == name
    memory = driver.memory()
    assert 0 < memory.free_bytes <= memory.total_bytes
    reference = registry.load("cpu_ref")()
    assert make_plan(driver, OpOptions(), reference=reference).driver == name


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, deepinfer_conformance; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_reported_memory_is_what_the_test_asks_for() -> None:
    for driver_class in (NullDriver, OracleDriver):
        memory = driver_class(memory_bytes=12345).memory()
        assert dataclasses.astuple(memory) == (12345, 12345, 0)
