"""Inputs are data: the same bits everywhere, a digest that sees every change, files that give back what went in."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch

from deepinfer.errors import ArgumentError
from deepinfer_conformance.cases import all_specimens
from deepinfer_conformance.data.call import OpCall, tensors
from deepinfer_conformance.data.digest import input_sha256
from deepinfer_conformance.data.draws import Draws
from deepinfer_conformance.data.layouts import copied, pitched, same_bits, turned
from deepinfer_conformance.data.stored import load_call, save_call


def test_draws_are_the_same_bits_on_every_machine() -> None:
    draws = Draws(7, "frozen")
    parts = (draws.normal("n", 3, 5), draws.uniform("u", 4), draws.integers("i", -5, 9, 6), draws.bytes("b", 7))
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    assert digest == "e9ab1d6bac2c577b3eb4e31491e11be6d235c33e7f76dd02b03c0f5e4e20ab2d"


def test_draws_of_another_name_seed_or_part_are_others() -> None:
    base = Draws(0, "case").normal("x", 64)
    for other in (Draws(1, "case"), Draws(0, "other"), Draws(0, "case").sub("part")):
        assert not torch.equal(base, other.normal("x", 64))
    assert not torch.equal(base, Draws(0, "case").normal("y", 64))


def test_normal_values_have_mean_zero_and_the_deviation_that_was_asked_for() -> None:
    values = Draws(0, "moments").normal("x", 20_000, scale=3.0)
    assert abs(float(values.mean())) < 0.1
    assert float(values.std()) == pytest.approx(3.0, rel=0.03)


def test_a_permutation_holds_every_number_once() -> None:
    assert sorted(Draws(0, "p").permutation("x", 37).tolist()) == list(range(37))


def test_copies_keep_strides_offset_and_the_bytes_between() -> None:
    base = torch.arange(40.0)
    view = torch.as_strided(base, (3, 4), (10, 2), 5)
    copy = copied(view, torch.device("cpu"))
    assert (copy.stride(), copy.storage_offset()) == ((10, 2), 5)
    assert torch.equal(copy, view)
    assert torch.equal(torch.as_strided(copy, (20,), (1,), 5), base[5:25])
    assert copy.data_ptr() != view.data_ptr()


def test_awkward_layouts_keep_the_values() -> None:
    x = torch.arange(24.0).view(4, 6)
    for view in (pitched(x, float("nan")), turned(x)):
        assert torch.equal(view, x)
        assert not view.is_contiguous()


@pytest.mark.parametrize("change", ["value", "name", "op", "stride", "number"])
def test_the_digest_sees_every_change(change: str) -> None:
    call = OpCall("norm.rms", {"x_TD": torch.ones(4, 6), "weight_D": torch.ones(6), "eps": 1e-6})
    changed = {
        "value": lambda: call.replacing(x_TD=torch.ones(4, 6).index_fill(0, torch.tensor([2]), 2)),
        "name": lambda: OpCall("norm.rms", {"y_TD": call.tensor("x_TD"), **dict(list(call.arguments.items())[1:])}),
        "op": lambda: OpCall("norm.rotary", call.arguments),
        "stride": lambda: call.replacing(x_TD=torch.ones(6, 4).t()),
        "number": lambda: call.replacing(eps=1e-7),
    }[change]()
    assert input_sha256(changed) != input_sha256(call)


def test_a_negative_zero_and_another_nan_change_the_bits() -> None:
    assert not bool(same_bits(torch.tensor([0.0]), torch.tensor([-0.0])))
    assert bool(same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")])))


def test_every_specimen_is_built_twice_with_the_same_digest_and_can_be_stored(tmp_path: Path) -> None:
    seen: set[str] = set()
    for specimen in all_specimens(3):
        if specimen.op in seen or "virtual" in specimen.name:
            continue
        seen.add(specimen.op)
        options = specimen.options[0]
        call = specimen.build(options)
        assert input_sha256(call) == input_sha256(specimen.build(options)), specimen.op
        path = tmp_path / f"{specimen.op}.case"
        save_call(call, options, path)
        loaded, loaded_options = load_call(path)
        assert loaded_options == dataclasses.replace(options, batch_invariant=False)
        before, after = dict(tensors(call.arguments)), dict(tensors(loaded.arguments))
        assert before.keys() == after.keys(), specimen.op
        assert all(bool(same_bits(before[name], after[name]).all()) for name in before), specimen.op


def test_a_file_that_is_no_case_says_so(tmp_path: Path) -> None:
    path = tmp_path / "broken.case"
    path.write_bytes(b"nothing")
    with pytest.raises(ArgumentError, match="no captured case"):
        load_call(path)
    with pytest.raises(ArgumentError, match="no captured case"):
        load_call(tmp_path / "absent.case")
