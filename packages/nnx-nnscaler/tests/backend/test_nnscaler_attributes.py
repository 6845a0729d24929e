"""The attributes whose values a program fixes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nnx_nnscaler.trace.fingerprint import current
from nnx_nnscaler.trace.reads import read_by_forward


class Branching(nn.Module):
    from_class: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.warm = False
        self.width = 3
        self.steps_seen = 0
        self.note = {"not": "read"}

    @property
    def doubled(self) -> int:
        return 2 * self.width

    def count(self) -> None:
        self.steps_seen += 1

    def helper(self, x: Tensor) -> Tensor:
        return x if self.from_class is None else x * self.from_class

    def forward(self, x: Tensor) -> Tensor:
        x = self.helper(self.layer(x)) if self.warm else x
        return next(y * self.doubled for y in [x])


class Derived(Branching):
    def __init__(self) -> None:
        super().__init__()
        self.extra = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra


def names(module: nn.Module) -> set[str]:
    return {name for space, name in read_by_forward(module) if space is vars(module)}


def test_what_the_forward_and_its_methods_and_properties_read_is_found_and_nothing_else():
    assert names(Branching()) == {"warm", "width", "from_class"}


def test_what_the_forward_of_a_base_class_reads_is_found_too():
    assert names(Derived()) == {"warm", "width", "from_class", "extra"}


def test_attributes_of_submodules_are_found():
    assert (vars := read_by_forward(nn.Sequential(nn.Dropout(0.25))))
    assert {name: space[name] for space, name in vars} == {"p": 0.25, "inplace": False}


def test_what_stays_whole_is_left_out():
    module = nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.5))
    assert [space["p"] for space, name in read_by_forward(module, besides=["0"]) if name == "p"] == [0.5]


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"a": [1]}, lambda value: value["a"].append(2)),
        ([{1}], lambda value: value[0].add(2)),
        (torch.ones(2), lambda value: value.add_(1)),
        (np.ones(2), lambda value: value.fill(0)),
        (SimpleNamespace(a=SimpleNamespace(b=1)), lambda value: setattr(value.a, "b", 2)),
    ],
)
def test_a_value_is_told_from_its_former_self(value: Any, change: Any):
    before = current(value)
    assert current(value) == before and hash(before) == hash(current(value))
    change(value)
    assert current(value) != before


def test_numbers_of_other_types_are_other_values():
    assert len({current(value) for value in (1, 1.0, True)}) == 3
    assert current(float("nan")) == current(float("nan"))


def test_a_value_with_too_much_in_it_is_refused():
    with pytest.raises(TypeError, match=r"it reads a dict with more than 10000 values"):
        current({str(number): number for number in range(10_000)})
