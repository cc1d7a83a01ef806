"""Host values on their way to a device: nothing is copied on the host, nobody waits elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deepinfer.accelerator.upload import on_device

CPU = torch.device("cpu")


def test_on_the_host_an_array_is_not_copied() -> None:
    values = np.arange(4)
    tensor = on_device(values, CPU)
    values[0] = 7
    assert tensor.tolist() == [7, 1, 2, 3]


@pytest.mark.parametrize("values", [np.arange(6).reshape(2, 3).T, np.arange(4)[::-1], np.zeros((0, 3), bool)])
def test_any_array_arrives_with_its_shape_and_type(values: Any) -> None:
    tensor = on_device(values, CPU)
    assert tensor.numpy().dtype == values.dtype
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_a_tensor_is_taken_as_it_is() -> None:
    tensor = torch.ones(2, 3)
    assert on_device(tensor, CPU) is tensor


def test_elsewhere_it_goes_out_of_page_locked_memory_and_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def pin(self: torch.Tensor) -> torch.Tensor:
        calls.append("pinned")
        return self

    def to(self: torch.Tensor, device: torch.device, **options: Any) -> torch.Tensor:
        calls.append((device.type, options))
        return self

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert on_device(np.arange(3), torch.device("cuda", 0)).tolist() == [0, 1, 2]
    assert calls == ["pinned", ("cuda", {"non_blocking": True})]
