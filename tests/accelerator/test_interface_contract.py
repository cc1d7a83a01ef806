"""The contract keeps its own word: every op says what it is, and what nobody implements is refused, not guessed."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
import torch

from deepinfer.accelerator import (
    OP_GROUPS,
    AcceleratorDriver,
    Availability,
    Capabilities,
    ImmediateStream,
    LostRanksError,
    MemoryInfo,
    OpCapability,
    OpOptions,
    Ops,
    RankPlace,
    Reason,
    Repeatability,
    SoloCollectives,
    StepLayout,
    all_op_names,
)
from deepinfer.accelerator.ops.base import OpGroup
from deepinfer.accelerator.ops.norm import NormOps
from deepinfer.errors import ArgumentError, DeterminismError, OpRefusedError

OPS = [(group, name) for group in OP_GROUPS for name in group.op_names()]
IDS = [f"{group.group}.{name}" for group, name in OPS]


class BareDriver(AcceleratorDriver):
    name = "bare"
    interface_version = (1, 0)

    @classmethod
    def availability(cls) -> Availability:
        return Availability()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def memory(self) -> MemoryInfo:
        return MemoryInfo(1, 1)

    def capabilities(self) -> Capabilities:
        return Capabilities(ops={})

    def op_groups(self, options: OpOptions) -> dict[str, OpGroup]:
        return {}


@pytest.mark.parametrize(("group", "name"), OPS, ids=IDS)
def test_every_op_is_documented_and_typed(group, name) -> None:
    function = getattr(group, name)
    signature = inspect.signature(function)
    assert inspect.getdoc(function)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in list(signature.parameters.values())[1:]:
        assert parameter.annotation is not inspect.Parameter.empty, parameter
        assert parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD), parameter


@pytest.mark.parametrize(("group", "name"), OPS, ids=IDS)
def test_an_op_that_nobody_overrides_is_refused_by_name(group, name) -> None:
    function = getattr(group(), name)
    needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
    with pytest.raises(OpRefusedError, match=rf"'{group.group}\.{name}' is not implemented"):
        function(*[None] * len(needed))


def test_names_are_closed_distinct_and_the_fields_of_ops() -> None:
    assert len(set(all_op_names())) == len(all_op_names()) == len(OPS)
    assert [group.group for group in OP_GROUPS] == list(Ops.__slots__)


@pytest.mark.parametrize("group", OP_GROUPS)
def test_ops_that_share_weights_are_ops_of_their_group(group) -> None:
    for names in group.bound_together:
        assert set(names) <= set(group.op_names())


def test_only_an_override_counts_as_implemented() -> None:
    class Half(NormOps):
        def rms(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
            return x_TD

    class Heir(Half):
        pass

    assert NormOps.implemented() == ()
    assert Half.implemented() == ("rms",)
    assert Heir.implemented() == ("rms",)
    assert Heir.op_names() == NormOps.op_names()


def test_defaults_claim_as_little_as_possible() -> None:
    claim = OpCapability()
    assert claim.dtypes == {torch.float32}
    assert claim.numerics == {"portable"}
    assert claim.kv_formats == {"released"}
    assert not claim.graph_safe
    assert claim.repeatability == Repeatability.RUN_TO_RUN
    claims = Capabilities(ops={})
    assert (claims.graphs, claims.collectives, claims.declared_fallbacks) == (False, (), ())


def test_a_driver_refuses_what_it_does_not_override() -> None:
    driver = BareDriver()
    with pytest.raises(OpRefusedError, match="graphs"):
        driver.new_graph()
    with pytest.raises(OpRefusedError, match="2 ranks"):
        driver.collectives(2)
    with pytest.raises(OpRefusedError, match="'bare' 0 cannot join a group of 3 ranks"):
        driver.join_group(RankPlace(2, 3, "host:1"))
    assert driver.join_group(RankPlace(0, 1, "host:1")).world_size == 1
    driver.set_determinism(Repeatability.NONE, [])
    with pytest.raises(DeterminismError, match="R2"):
        driver.set_determinism(Repeatability.BATCH_INVARIANT, [])


def test_a_synchronous_device_needs_nothing_more() -> None:
    driver = BareDriver()
    driver.synchronize()
    stream = driver.new_stream()
    assert isinstance(stream, ImmediateStream)
    event = stream.record_event()
    stream.wait_event(event)
    event.wait()
    assert event.done()
    assert driver.allocate((2, 0, 3), torch.uint8).shape == (2, 0, 3)


def test_a_driver_is_available_exactly_without_reasons() -> None:
    assert Availability().available
    assert not Availability((Reason("no chip", "plug one in"),)).available


def test_a_group_of_one_exchanges_with_itself_and_refuses_other_ranks() -> None:
    group, rows = SoloCollectives(), torch.arange(6.0).view(3, 2)
    assert (group.rank, group.world_size) == (0, 1)
    group.barrier()
    results = [group.all_reduce_sum(rows), group.all_to_all(rows, [3], [3]), group.broadcast(rows, 0)]
    for result in [*results, group.all_gather(rows)[0]]:
        assert torch.equal(result, rows)
        assert result.data_ptr() != rows.data_ptr()
    for send, receive in ([[2], [3]], [[3], [2]], [[3, 0], [3]]):
        with pytest.raises(OpRefusedError, match="3 rows"):
            group.all_to_all(rows, send, receive)
    with pytest.raises(OpRefusedError, match="rank 1"):
        group.broadcast(rows, 1)


def test_a_driver_that_offers_a_group_of_one_itself_is_asked_for_it() -> None:
    class Own(BareDriver):
        def collectives(self, world_size: int) -> SoloCollectives:
            return own

    own = SoloCollectives()
    assert Own().join_group(RankPlace(0, 1, "host:1")) is own


def test_a_place_knows_where_to_meet() -> None:
    place = RankPlace(1, 4, "10.0.0.7:29500", 3.5)
    assert (place.host, place.port, place.deadline_s) == ("10.0.0.7", 29500, 3.5)
    assert (RankPlace(0, 1, "[fe80::1]:80").host, RankPlace(0, 1, "[fe80::1]:80").port) == ("fe80::1", 80)


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:port", "host:0", "host:65536", "host:-1", "host:٣"])
def test_an_address_without_host_and_port_is_refused(address) -> None:
    with pytest.raises(ArgumentError, match="write host:port"):
        RankPlace(0, 1, address)


def test_a_place_that_cannot_be_is_refused_with_everything_that_is_wrong() -> None:
    with pytest.raises(ArgumentError) as caught:
        RankPlace(4, 4, "nowhere", 0.0)
    assert [problem.split(" ")[0] for problem in caught.value.problems] == ["rank", "address", "deadline_s"]
    for world_size, rank, deadline_s in ((0, 0, 1.0), (2, -1, 1.0), (2, 0, float("inf")), (2, 0, float("nan"))):
        with pytest.raises(ArgumentError):
            RankPlace(rank, world_size, "host:1", deadline_s)


def test_lost_ranks_are_named_in_order_and_nobody_is_blamed_where_nobody_can_be_told() -> None:
    error = LostRanksError("group of 4", (3, 1), "barrier")
    assert error.missing == (1, 3)
    assert "rank 1, rank 3 did not join" in str(error)
    assert "cannot be told" in str(LostRanksError("group of 4", (), "barrier"))


def test_a_step_knows_its_sizes() -> None:
    some = torch.zeros(5, dtype=torch.int64)
    step = StepLayout(
        kind="decode",
        block_size=4,
        ring=9,
        row_starts_R1=torch.tensor([0, 2, 5]),
        cached_R=some[:2],
        state_slots_R=some[:2],
        block_table_RB=some[:2, None],
        request_T=some,
        position_T=some,
        window_start_R=some[:2],
        image_T=some.bool(),
        valid_T=some.bool(),
        max_position=1,
        max_rows=3,
    )
    assert (step.rows, step.requests) == (5, 2)


def test_the_contract_imports_neither_the_engine_nor_a_vendor_runtime() -> None:
    code = (
        "import sys, deepinfer.accelerator; "
        "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('deepinfer.')}), "
        "[name for name in ('triton', 'torch_npu', 'deepinfer_cpu_ref') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in {
        "['accelerator', 'errors', 'numerics'] []",
        "['accelerator', 'errors', 'numerics', 'settings'] []",
    }
