"""The faulty driver does exactly the wrong that it was told, when it was told, and can say that it did."""

from __future__ import annotations

import pytest
import torch

from deepinfer.accelerator import OpOptions, Plan, Repeatability, make_plan, registry
from deepinfer.accelerator.ops.mixing import MixWeights
from deepinfer.accelerator.weights import StoredWeight
from deepinfer.errors import ArgumentError, DeepInferError, DeterminismError
from deepinfer.numerics import WindowRecord
from deepinfer_conformance.drivers import (
    Calls,
    Fault,
    FaultKind,
    FaultyDriver,
    InjectedFaultError,
    NullDriver,
    OracleDriver,
)

X_TD = torch.arange(12, dtype=torch.float32).view(3, 4) + 1
ONES_D = torch.ones(4)


def planned(*faults: Fault, seed: int = 0) -> tuple[FaultyDriver, Plan]:
    driver = FaultyDriver.wrapping(registry.load("cpu_ref")(), faults, seed=seed)
    return driver, make_plan(driver, OpOptions())


def rms(plan: Plan) -> torch.Tensor:
    return plan.ops.norm.rms(X_TD, ONES_D, 1e-6)


RIGHT = rms(make_plan(registry.load("cpu_ref")(), OpOptions()))


def test_without_faults_every_result_is_the_wrapped_drivers() -> None:
    driver, plan = planned()
    assert torch.equal(rms(plan), RIGHT)
    assert driver.strikes == ()
    assert driver.calls("norm.rms") == 1
    assert {row.driver for row in plan.rows} == {"faulty"}
    assert driver.capabilities() == registry.load("cpu_ref")().capabilities()


def test_a_value_is_off_by_the_amount_in_one_element() -> None:
    driver, plan = planned(Fault(op="norm.rms", kind=FaultKind.VALUE, row=1, element=2, amount=0.5))
    off = rms(plan) - RIGHT
    assert off[1, 2] == pytest.approx(0.5, abs=1e-6)
    assert off.count_nonzero() == 1
    assert [(strike.op, strike.call, strike.element) for strike in driver.strikes] == [("norm.rms", 1, 6)]


def test_a_nan_stands_in_one_element() -> None:
    _, plan = planned(Fault(op="norm.rms", kind=FaultKind.NAN, row=2))
    wrong = rms(plan).isnan()
    assert wrong.sum() == 1
    assert wrong[2].any()


@pytest.mark.parametrize("bit", [0, 22, 31])
def test_one_bit_is_flipped(bit) -> None:
    _, plan = planned(Fault(op="norm.rms", kind=FaultKind.BIT, element=5, bit=bit))
    difference = rms(plan).view(torch.int32) ^ RIGHT.view(torch.int32)
    assert difference.flatten().tolist() == [(1 << bit) - (1 << 32) * (bit == 31) if e == 5 else 0 for e in range(12)]


def test_a_result_never_aliases_an_argument_that_a_fault_could_spoil() -> None:
    _, plan = planned(Fault(op="norm.rms", kind=FaultKind.VALUE), Fault(op="norm.rms", kind=FaultKind.NAN, part="x_TD"))
    kept = X_TD.clone()
    rms(plan)
    assert torch.equal(X_TD, kept)


@pytest.mark.parametrize(
    ("calls", "struck"),
    [
        (Calls(), [1, 2, 3, 4, 5, 6]),
        (Calls.at(3), [3]),
        (Calls(first=4), [4, 5, 6]),
        (Calls(last=2), [1, 2]),
        (Calls(first=2, every=3), [2, 5]),
    ],
)
def test_calls_choose_when(calls, struck) -> None:
    driver, plan = planned(Fault(op="norm.rms", kind=FaultKind.NAN, calls=calls))
    seen = [number for number in range(1, 7) if rms(plan).isnan().any()]
    assert seen == struck
    assert [strike.call for strike in driver.strikes] == struck


def test_calls_are_counted_per_op() -> None:
    _, plan = planned(Fault(op="norm.*", kind=FaultKind.NAN, calls=Calls.at(2)))
    plan.ops.mixing.collapse(torch.zeros(1, 2, 4), torch.zeros(1, 2))
    assert not rms(plan).isnan().any()
    assert rms(plan).isnan().any()


@pytest.mark.parametrize(("row", "element"), [(3, None), (None, 12), (1, 4)])
def test_a_place_that_a_call_does_not_have_is_not_struck(row, element) -> None:
    driver, plan = planned(Fault(op="norm.rms", kind=FaultKind.NAN, row=row, element=element))
    assert torch.equal(rms(plan), RIGHT)
    assert not driver.strikes


def test_zero_rows_are_not_struck() -> None:
    driver, plan = planned(Fault(op="norm.rms", kind=FaultKind.NAN))
    assert plan.ops.norm.rms(X_TD[:0], ONES_D, 1e-6).shape == (0, 4)
    assert not driver.strikes


def test_the_seed_chooses_the_element_and_repeats_itself() -> None:
    def places(seed: int) -> list[int | None]:
        driver, plan = planned(Fault(op="norm.rms", kind=FaultKind.NAN), seed=seed)
        for _ in range(8):
            rms(plan)
        return [strike.element for strike in driver.strikes]

    assert places(1) == places(1)
    assert places(1) != places(2)
    assert len(set(places(1))) > 2


def test_an_error_is_raised_instead_of_the_call() -> None:
    driver, plan = planned(Fault(op="norm.rms", kind=FaultKind.RAISE, calls=Calls.at(2)))
    rms(plan)
    with pytest.raises(InjectedFaultError, match=r"'norm.rms', call 2"):
        rms(plan)
    assert torch.equal(rms(plan), RIGHT)
    assert isinstance(InjectedFaultError("x"), DeepInferError)
    assert len(driver.strikes) == 1


def test_out_of_memory_is_torchs_own_error() -> None:
    _, plan = planned(Fault(op="norm.rms", kind=FaultKind.OUT_OF_MEMORY))
    with pytest.raises(torch.OutOfMemoryError, match=r"norm\.rms"):
        rms(plan)


def test_a_delay_is_slept_and_changes_nothing() -> None:
    slept: list[float] = []
    fault = Fault(op="norm.rms", kind=FaultKind.DELAY, delay_s=7.0)
    driver = FaultyDriver(registry.load("cpu_ref")(), [fault], sleep=slept.append)
    assert torch.equal(rms(make_plan(driver, OpOptions())), RIGHT)
    assert slept == [7.0]


@pytest.mark.parametrize("calls_ago", [1, 2])
def test_a_stale_result_is_an_earlier_one(calls_ago) -> None:
    driver, plan = planned(Fault(op="linear.embed", kind=FaultKind.STALE, calls=Calls(first=3), calls_ago=calls_ago))
    table = torch.arange(10.0)[:, None]
    results = [plan.ops.linear.embed(torch.tensor([number]), table) for number in (1, 2, 3, 4)]
    assert [int(result) for result in results] == [1, 2, 3 - calls_ago, 4 - calls_ago]
    results[2].fill_(-1)
    assert len(driver.strikes) == 2


def test_a_stale_result_of_another_shape_is_not_given() -> None:
    driver, plan = planned(Fault(op="linear.embed", kind=FaultKind.STALE))
    table = torch.arange(10.0)[:, None]
    assert plan.ops.linear.embed(torch.tensor([1]), table).shape == (1, 1)
    assert plan.ops.linear.embed(torch.tensor([2, 3]), table).tolist() == [[2.0], [3.0]]
    assert not driver.strikes


def test_a_stale_store_is_a_store_that_did_not_happen() -> None:
    driver, plan = planned(Fault(op="moves.zero", kind=FaultKind.STALE, calls=Calls.at(1)))
    pool = torch.ones((3, 4), dtype=torch.uint8)
    plan.ops.moves.zero(pool, torch.tensor([1]))
    assert pool.sum() == 12
    plan.ops.moves.zero(pool, torch.tensor([2]))
    assert pool.sum() == 8
    assert len(driver.strikes) == 1


def test_a_parameter_can_be_struck_and_the_callers_own_is_left_alone() -> None:
    driver, plan = planned(Fault(op="moves.copy", kind=FaultKind.VALUE, part="target_n", amount=1))
    pool = torch.arange(4, dtype=torch.uint8)[:, None].repeat(1, 2)
    target = torch.tensor([2])
    plan.ops.moves.copy(pool, torch.tensor([0]), target)
    assert pool[:, 0].tolist() == [0, 1, 2, 0]
    assert target.tolist() == [2]
    assert len(driver.strikes) == 1


def test_a_field_of_a_result_can_be_struck() -> None:
    _, plan = planned(Fault(op="mixing.mixes", kind=FaultKind.NAN, part="result.post_TS", row=0))
    weights = MixWeights(torch.zeros(8, 8), torch.zeros(8), torch.zeros(3))
    mix = plan.ops.mixing.mixes(torch.ones(2, 2, 4), weights, 2, 1e-6, 1e-6)
    assert mix.post_TS[0].isnan().sum() == 1
    assert not mix.pre_TS.isnan().any()
    assert not mix.comb_TSS.isnan().any()


def test_faults_of_one_call_add_up_in_order() -> None:
    fault = Fault(op="norm.rms", kind=FaultKind.VALUE, row=0, element=0, amount=1.0)
    driver, plan = planned(fault, fault)
    assert (rms(plan) - RIGHT)[0, 0] == pytest.approx(2.0, abs=1e-6)
    assert len(driver.strikes) == 2


def test_prepared_weights_pass_through() -> None:
    _, plan = planned(Fault(op="linear.dense", kind=FaultKind.VALUE, row=0, element=0))
    stored = StoredWeight("w", "float32", torch.eye(4), None, 4, 4)
    off = plan.ops.linear.dense(X_TD, plan.ops.linear.prepare(stored)) - X_TD
    assert off[0, 0] == 1
    assert off.count_nonzero() == 1


def test_allocation_and_synchronisation_can_fail() -> None:
    driver = FaultyDriver.wrapping(
        NullDriver(),
        [
            Fault(op="device.allocate", kind=FaultKind.OUT_OF_MEMORY, calls=Calls.at(2)),
            Fault(op="device.synchronize", kind=FaultKind.RAISE),
        ],
    )
    assert driver.allocate((2,), torch.float32).shape == (2,)
    with pytest.raises(torch.OutOfMemoryError):
        driver.allocate((2,), torch.float32)
    with pytest.raises(InjectedFaultError):
        driver.synchronize()


def test_device_and_determinism_are_the_wrapped_drivers() -> None:
    driver = FaultyDriver.wrapping(OracleDriver(memory_bytes=77), [])
    assert driver.memory().total_bytes == 77
    assert driver.collectives(1).world_size == 1
    driver.new_stream().record_event().wait()
    driver.set_determinism(Repeatability.BATCH_INVARIANT, [])
    with pytest.raises(DeterminismError):
        driver.set_determinism(Repeatability.SPECULATION_INVARIANT, [])
    with pytest.raises(DeepInferError, match="graphs"):
        driver.new_graph()
    assert driver.capabilities() == driver.wrapped.capabilities()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"op": "norm.rmss", "kind": FaultKind.NAN}, "no op of the contract"),
        ({"op": "norm.rms", "kind": FaultKind.RAISE, "part": "x_TD"}, "no meaning"),
        ({"op": "norm.rms", "kind": FaultKind.VALUE, "amount": 0.0}, "changes nothing"),
        ({"op": "norm.rms", "kind": FaultKind.BIT, "bit": -1}, "not negative"),
        ({"op": "norm.rms", "kind": FaultKind.NAN, "row": -1}, "not negative"),
        ({"op": "norm.rms", "kind": FaultKind.STALE, "calls_ago": 0}, "no earlier call"),
        ({"op": "x", "kind": FaultKind.RAISE, "part": "y", "amount": 0.0}, "3 problems"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_when_it_is_written(arguments, message) -> None:
    with pytest.raises(ArgumentError, match=message):
        Fault(**arguments)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(op="norm.rms", kind=FaultKind.NAN, part="y_TD"),
        Fault(op="norm.rms", kind=FaultKind.NAN, part="eps"),
        Fault(op="norm.rms", kind=FaultKind.NAN, part="result.field"),
        Fault(op="norm.rms", kind=FaultKind.BIT, bit=32),
    ],
)
def test_a_fault_that_does_not_fit_the_call_is_refused_when_it_is_due(fault) -> None:
    _, plan = planned(fault)
    with pytest.raises(ArgumentError, match=r"norm\.rms"):
        rms(plan)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(op="codec.encode", kind=FaultKind.NAN),
        Fault(op="codec.encode", kind=FaultKind.VALUE, amount=0.5),
    ],
)
def test_a_fault_that_a_dtype_cannot_show_is_refused(fault) -> None:
    _, plan = planned(fault)
    with pytest.raises(ArgumentError, match="uint8"):
        plan.ops.codec.encode(torch.ones(1, 32), WindowRecord(32))


@pytest.mark.parametrize("amount", [-1.0, 1.0])
def test_integers_are_off_by_whole_amounts(amount) -> None:
    _, plan = planned(Fault(op="codec.encode", kind=FaultKind.VALUE, amount=amount, element=0))
    off = plan.ops.codec.encode(torch.ones(1, 32), WindowRecord(32)).int() - WindowRecord(32).encode(torch.ones(1, 32))
    assert off.flatten().tolist() == [int(amount)] + [0] * 32


@pytest.mark.parametrize("arguments", [{"first": 0}, {"every": 0}, {"first": 3, "last": 2}])
def test_calls_that_never_come_are_refused(arguments) -> None:
    with pytest.raises(ArgumentError, match="names no call"):
        Calls(**arguments)
