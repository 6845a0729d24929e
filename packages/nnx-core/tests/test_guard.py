"""Guarded tensors within the transforms of torch.func, which wrap a tensor's storage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nnx_core.view.guard import Part, guard

WHOLE = torch.arange(6.0).reshape(3, 2)


class Rows(Part):
    """The first row is here; the others can be had."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    @property
    def description(self) -> Tensor:
        return WHOLE.to("meta")

    def unsharded(self) -> Tensor:
        return WHOLE

    def value(self) -> Tensor:
        return WHOLE

    def flush(self) -> None:
        """Nothing is changed here."""

    def assign(self, values: Tensor) -> None:
        raise NotImplementedError

    def gradient_shown(self) -> Tensor | None:
        return None

    def gradient_given(self, gradient: Any) -> None:
        raise NotImplementedError

    def hook(self, register: Any, hook: Any) -> Any:
        raise NotImplementedError


@pytest.fixture
def guarded() -> nn.Parameter:
    made = nn.Parameter(WHOLE[:1].clone())
    guard(made, Rows(made))
    return made


def of_weights(given: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ given["w"].T).square().sum()


def test_torch_func_differentiates_by_the_whole(guarded: nn.Parameter) -> None:
    x = torch.ones(4, 2)
    wanted = torch.func.grad(of_weights)({"w": WHOLE}, x)["w"]
    assert torch.equal(torch.func.grad(of_weights)({"w": guarded}, x)["w"], wanted)
    _, back = torch.func.vjp(of_weights, {"w": guarded}, x)
    assert torch.equal(back(torch.tensor(1.0))[0]["w"], wanted)


def test_gradients_of_each_sample_are_by_the_whole(guarded: nn.Parameter) -> None:
    x = torch.arange(8.0).reshape(4, 2)
    each = torch.func.vmap(torch.func.grad(of_weights), in_dims=(None, 0))
    assert torch.equal(each({"w": guarded}, x)["w"], each({"w": WHOLE}, x)["w"])
