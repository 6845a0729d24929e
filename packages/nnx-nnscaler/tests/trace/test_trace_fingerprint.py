"""The fingerprint changes if and only if a trace would change."""

import os
import sys

import pytest
import torch
from torch import nn

from jobs.nnscaler_trace_models import Gpt, Mlp
from nnx_conformance.pool import WorkerPool
from nnx_nnscaler.trace import fingerprint
from nnx_nnscaler.trace.reads import read_by_forward

SCALE = 2.0
X = torch.zeros(3, 8)


def helper(x):
    return x * SCALE


class Model(nn.Module):
    def __init__(self, factor=1.0):
        super().__init__()
        self.layer, self.factor, self.unused = nn.Linear(8, 8), factor, object()
        self.rank = 0

    def forward(self, x):
        return helper(self.layer(x)) * self.factor


def of(module, args=(X,), kwargs=None):
    return fingerprint(module, args, kwargs)


def test_values_do_not_matter():
    torch.manual_seed(1)
    first = of(Model())
    torch.manual_seed(2)
    assert of(Model(), (torch.ones(3, 8),)) == first


def test_attributes_that_no_code_names_do_not_matter():
    module = Model()
    first = of(module)
    module.rank = 1
    assert of(module) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.eval(),
        lambda m: m.layer.eval(),
        lambda m: m.layer.weight.requires_grad_(False),
        lambda m: setattr(m, "factor", 2.0),
        lambda m: setattr(m, "layer", nn.Linear(8, 8, bias=False)),
        lambda m: m.half(),
        lambda m: m.register_buffer("extra", torch.zeros(1)),
        lambda m: setattr(m, "forward", lambda x: x),
    ],
)
def test_structure_and_plain_attributes_matter(change):
    module = Model()
    first = of(module)
    change(module)
    assert of(module) != first


def test_attributes_of_torchs_modules_matter():
    assert of(nn.Sequential(nn.Dropout(0.1))) != of(nn.Sequential(nn.Dropout(0.2)))


def test_ties_matter():
    tied, untied = Gpt(), Gpt()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    assert of(tied) != of(untied)


def test_code_matters_also_that_of_functions_and_constants_it_names(monkeypatch):
    first = of(Model())
    this = sys.modules[__name__]
    monkeypatch.setattr(this, "SCALE", 3.0)
    second = of(Model())
    monkeypatch.setattr(this, "helper", lambda x: x + SCALE)
    third = of(Model())
    monkeypatch.setattr(Model, "forward", lambda self, x: self.layer(x) * 1000)
    assert len({first, second, third, of(Model())}) == 4


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.zeros(4, 8),), {}),
        ((X.double(),), {}),
        ((X.clone().requires_grad_(),), {}),
        ((), {"x": X}),
        ((X,), {"flag": True}),
        (([X],), {}),
    ],
)
def test_what_inputs_look_like_matters(args, kwargs):
    assert of(Mlp(), args, kwargs) != of(Mlp())


def test_constants_among_the_inputs_matter():
    assert of(Mlp(), (X, True)) != of(Mlp(), (X, False))


def of_a_gpt():
    """Return the fingerprint, and a value that depends on the order of sets."""
    return of(Gpt(), (torch.zeros(2, 8, dtype=torch.long),)), hash("order")


def test_it_is_the_same_in_every_process(pool: WorkerPool):
    found = [of_a_gpt(), *pool.run(of_a_gpt, world_size=2)]
    assert len({seed for _, seed in found}) == 3 or "PYTHONHASHSEED" in os.environ
    assert len({text for text, _ in found}) == 1


class ReadsMore(nn.Module):
    def forward(self, x):
        return x * self.seldom


class Instead(ReadsMore):
    def forward(self, x):
        return x * self.often


class OnTop(ReadsMore):
    def forward(self, x):
        return super().forward(x) * self.often


class ByItsName(ReadsMore):
    def forward(self, x):
        return ReadsMore.forward(self, x)


class ByAnotherMethod(Instead):
    def forward(self, x):
        return self.other(x)

    def other(self, x):
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "reads"), [(Instead, False), (OnTop, True), (ByItsName, True), (ByAnotherMethod, True)]
)
def test_what_an_overridden_forward_reads_counts_where_it_is_called(kind, reads):
    module = kind()
    module.seldom = module.often = 1.0
    assert ("seldom" in [name for _, name in read_by_forward(module)]) == reads
