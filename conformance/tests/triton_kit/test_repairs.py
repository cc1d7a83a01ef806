"""Each repair gives what compiled code gives, and is needed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from deepinfer_conformance import triton_cpu
from deepinfer_conformance.triton_cpu import formats


def named(repairs: ModuleType, name: str) -> Any:
    (found,) = [repair for repair in repairs.REPAIRS if repair.name == name]
    return found


def test_a_repaired_kernel_gives_what_compiled_code_gives(repairs: ModuleType, repair_name: str) -> None:
    with triton_cpu.interpreted():
        assert repairs.agrees(named(repairs, repair_name))


def test_the_stock_interpreter_does_not(stock: dict[str, str], repair_name: str) -> None:
    """Should this fail on a new Triton, the repair can go."""
    assert stock[repair_name] != "right"


def test_a_wrong_rounding_would_be_seen(repairs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def truncate(self: formats.SmallFloat, values: formats.Array, **_options: bool) -> formats.Array:
        return encode(self, values, toward_zero=True)

    encode = formats.SmallFloat.encode
    monkeypatch.setattr(formats.SmallFloat, "encode", truncate)
    with triton_cpu.interpreted():
        answers = [repairs.agrees(repairs.REPAIRS[index]) for index in range(3)]
    assert answers == [False, False, False]


def test_a_dot_in_full_precision_keeps_the_low_bits(repairs: ModuleType) -> None:
    a, output = torch.full((32, 32), 1 + 2.0**-11), torch.empty(32, 32)
    triton_cpu.launch(repairs.dot_kernel, (1,), a, a, output, PRECISION="ieee", N=32)
    assert torch.all(output > 32.0)


def test_undefined_lanes_are_zeros_on_demand(repairs: ModuleType) -> None:
    x, output = torch.ones(16), torch.empty(16)
    with triton_cpu.interpreted(poison_undefined=False):
        repairs.undefined_kernel[(1,)](x, output, 10, N=16)
    assert output.tolist() == [1.0] * 10 + [0.0] * 6


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_triton_stays_changed_behind_a_block(repairs: ModuleType, *, fails: bool) -> None:
    language = repairs.tl

    def state() -> list[object]:
        places = (interpreter, language, language.core, language.math, language.tensor, JITFunction)
        return [(place, name, value) for place in places for name, value in sorted(vars(place).items(), key=str)]

    before, names = state(), set(vars(repairs))
    x = torch.ones(16, dtype=torch.bfloat16)
    if fails:
        with pytest.raises(triton_cpu.OutOfBoundsError):
            triton_cpu.launch(repairs.reduce_kernel, (1,), x, torch.empty(1, dtype=torch.bfloat16), OP="sum", N=32)
    else:
        triton_cpu.launch(repairs.reduce_kernel, (1,), x, torch.empty(1, dtype=torch.bfloat16), OP="sum", N=16)
    assert state() == before
    assert set(vars(repairs)) == names


@pytest.mark.parametrize("small", [formats.BF16, formats.E4M3, formats.E5M2])
def test_every_code_survives_decoding_and_encoding(small: formats.SmallFloat) -> None:
    codes = torch.arange(1 << small.bits).numpy().astype(small.code_dtype)
    values = small.decode(codes)
    keeps = (codes & ((1 << (small.bits - 1)) - 1)) <= small.largest_code
    assert (small.encode(values)[keeps] == codes[keeps]).all()
