"""Changes that code makes to Python's state around a model are undone, and named."""

import itertools
import os
import random
from collections import deque
from functools import partial
from io import StringIO

import numpy as np
import pytest
import torch
from torch import nn

from nnx_core.view.side_effects import PythonState

COUNT = 0


class Meter:
    total = 0

    def __init__(self):
        self.values = [1]
        self.best = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.count, self.names, self.queue, self.kinds = 0, {"a": 1}, deque([1]), {1}
        self.meter = Meter()
        self.numbers = np.zeros(2)
        self.python, self.numpy = random.Random(0), np.random.default_rng(0)
        self.old, self.torch = np.random.RandomState(0), torch.Generator()
        self.rates, self.lines = iter([1, 2, 3]), StringIO("1\n2\n")
        self.register_buffer("mean", torch.zeros(2))
        self.report = partial(self._report, [])
        seen = 0

        def see():
            nonlocal seen
            seen += 1
            return seen

        self.see = see

    def _report(self, lines):
        lines.append(1)
        return lines

    def count_globally(self):
        global COUNT
        COUNT += 1


def at_class(model):
    Meter.total += 1


def with_a_new_name(model):
    model.pe = torch.zeros(2)


def without_a_name(model):
    del model.count


def in_the_environment(model):
    os.environ["NNX_TEST_COUNT"] = "1"


CHANGES = [
    ("count", lambda model: setattr(model, "count", 1)),
    ("names", lambda model: model.names.update(a=2)),
    ("queue", lambda model: model.queue.append(2)),
    ("kinds", lambda model: model.kinds.add(2)),
    ("meter", lambda model: model.meter.values.append(2)),
    ("meter", lambda model: setattr(model.meter, "best", 2)),
    ("total", at_class),
    ("numbers", lambda model: model.numbers.__setitem__(0, 1)),
    ("python", lambda model: model.python.random()),
    ("numpy", lambda model: model.numpy.random()),
    ("old", lambda model: model.old.rand()),
    ("torch", lambda model: torch.rand(1, generator=model.torch)),
    ("rates", lambda model: next(model.rates)),
    ("lines", lambda model: model.lines.readline()),
    ("mean", lambda model: setattr(model, "mean", torch.ones(2))),
    ("report", lambda model: model.report()),
    ("seen", lambda model: model.see()),
    ("COUNT", lambda model: model.count_globally()),
    ("pe", with_a_new_name),
    ("count", without_a_name),
    ("NNX_TEST_COUNT", in_the_environment),
]


@pytest.mark.parametrize(
    ("name", "change"), CHANGES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CHANGES)]
)
def test_a_change_is_put_back_and_named(name, change):
    model = Model()
    before = PythonState(model)
    change(model)
    assert name in [found for _, found in before.restore()]
    assert before.restore() == []
    change(model)
    assert PythonState(model).restore() == []
    before.restore()
    assert (model.count, model.see(), next(model.rates), COUNT, Meter.total) == (0, 1, 1, 0, 0)
    assert model.torch.get_state().equal(torch.Generator().get_state())


@pytest.mark.parametrize(
    "steps",
    [
        lambda: (step for step in range(9)),
        itertools.count,
        lambda: itertools.cycle([1, 2]),
        lambda: zip([1, 2], [3, 4], strict=True),
        lambda: enumerate([1, 2]),
        lambda: map(abs, [1, 2]),
        lambda: iter({1: 2, 3: 4}),
        lambda: iter({1, 2}),
    ],
)
def test_iterators_that_cannot_be_rewound_are_named_if_they_advance(steps):
    model = nn.Linear(1, 1)
    model.steps = steps()
    before = PythonState(model)
    assert (before.generators, before.advanced()) == (["steps"], [])
    next(model.steps)
    assert before.advanced() == ["steps"]


def test_tensors_that_are_no_parameters_are_found():
    model = Model()
    model.meter.best = torch.ones(3)
    assert [tuple(tensor.shape) for tensor in PythonState(model).tensors] == [(3,)]
