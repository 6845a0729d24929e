"""Which attributes a program stands for the values of."""

from __future__ import annotations

from torch import Tensor, nn

from nnx_nnscaler.trace.fingerprint import read_by_forward


class Branching(nn.Module):
    from_class: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.warm = False
        self.width = 3
        self.steps_seen = 0
        self.note = {"not": "plain"}

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
