"""What is launched is listed, and what is listed can be told apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from deepinfer.accelerator import OpOptions
from deepinfer.accelerator.ops.experts import RouterWeights
from deepinfer.accelerator.ops.mixing import MixWeights
from deepinfer.accelerator.ops.norm import RotaryTable
from deepinfer.numerics import IndexRecord, LongRangeRecord, WindowRecord
from deepinfer_triton.codec import TritonCodecOps
from deepinfer_triton.experts import TritonRoutingOps
from deepinfer_triton.mixing import TritonMixingOps
from deepinfer_triton.moves import TritonMoveOps
from deepinfer_triton.norm import TritonNormOps
from deepinfer_triton.registry import configurations
from deepinfer_triton.sizes import TINY

if TYPE_CHECKING:
    from deepinfer_conformance.triton_cpu import Session


def listed() -> set[tuple[object, ...]]:
    return {
        (each.name, tuple(each.signature), tuple(sorted(each.constants.items())), each.num_warps, each.num_stages)
        for each in configurations()
    }


def test_configurations_are_distinct_and_name_every_parameter() -> None:
    found = configurations()
    assert len({(each.name, each.label) for each in found}) == len(found)
    for each in found:
        full = each.full_signature()
        assert {name for name, kind in full.items() if kind == "constexpr"} == set(each.constants), each.name


def test_no_integer_and_no_unpromised_address_is_specialised() -> None:
    """Otherwise Triton would compile, while serving, what nobody has checked."""
    for each in configurations():
        for parameter in each.kernel.params:
            kind = each.signature.get(parameter.name, "constexpr")
            if kind == "constexpr" or kind.startswith("*"):
                continue
            assert parameter.do_not_specialize, f"{each.name}: {parameter.name}"


def test_every_launch_of_the_small_model_is_listed(session: Session) -> None:
    options = OpOptions(activation_dtype=torch.bfloat16)
    rows, width, head = 3, TINY.hidden, TINY.head_width
    x_TD = torch.randn(rows, width).to(torch.bfloat16)
    x_THC = torch.randn(rows, TINY.heads, head).to(torch.bfloat16)
    angle = torch.randn(5, TINY.rotary // 2)
    norm, codec, mixing = TritonNormOps(options), TritonCodecOps(options), TritonMixingOps(options)
    norm.rms(x_TD, torch.ones(width), 1e-20)
    norm.rotary(x_THC, RotaryTable(angle.cos(), angle.sin()), torch.arange(rows), inverse=True)
    for record_format in (WindowRecord(head), LongRangeRecord(head), IndexRecord(TINY.index_width)):
        codec.encode(torch.randn(rows, record_format.width).to(torch.bfloat16), record_format)
    streams_TSD = torch.randn(rows, TINY.streams, width).to(torch.bfloat16)
    outputs = (2 + TINY.streams) * TINY.streams
    weights = MixWeights(torch.randn(outputs, TINY.streams * width), torch.randn(outputs), torch.ones(3))
    mix = mixing.mixes(streams_TSD, weights, 20, 1e-6, 1e-20)
    mixing.post(mixing.collapse(streams_TSD, mix.pre_TS), streams_TSD, mix)
    experts, top_k = TINY.routers[0]
    router = RouterWeights(torch.randn(experts, width).to(torch.bfloat16), torch.zeros(experts), torch.zeros(experts))
    flags = torch.ones(rows, dtype=torch.bool)
    routing = TritonRoutingOps(options)
    routing.route(x_TD, router, flags, flags, top_k, 1.5)
    routing.combine(torch.randn(rows, width), torch.randn(rows, top_k, width))
    pool = torch.zeros((4, 1056), dtype=torch.uint8)
    TritonMoveOps(options).copy(pool, torch.tensor([0]), torch.tensor([2]))
    TritonMoveOps(options).zero(pool, torch.tensor([1]))
    known = listed()
    for launch in session.launches:
        names = (*(each.name for each in launch.tensors), *(each.name for each in launch.scalars))
        constants = tuple(sorted((each.name, each.value) for each in launch.constexprs))
        chosen = {each.name: each.value for each in launch.options}
        key = (launch.kernel, names, constants, chosen["num_warps"], chosen["num_stages"])
        assert key in known, key
    assert len({launch.kernel for launch in session.launches}) >= 9


def test_launches_have_the_dtypes_of_their_configuration(session: Session) -> None:
    """The signature that is compiled ahead of time is the one that a launch has."""
    TritonNormOps(OpOptions()).rms(torch.randn(2, 64), torch.ones(64), 1e-6)
    (launch,) = session.launches
    assert [tensor.dtype for tensor in launch.tensors] == ["torch.float32"] * 3
    assert ("rms_norm_kernel", ("x_ptr", "weight_ptr", "out_ptr", "x_stride", "eps")) in {key[:2] for key in listed()}
