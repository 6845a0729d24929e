"""Random plans of whole models are right, in float64, against the module."""

from __future__ import annotations

import functools

import pytest
import torch

from jobs.nnscaler_fused_models import Fused, Grouped, tokens
from jobs.nnscaler_random_plans import random_plan
from nnx_nnscaler.parity import compare
from nnx_nnscaler.runtime.functions import Functions
from nnx_nnscaler.trace import trace_forward


@functools.cache
def _made(kind):
    torch.manual_seed(0)
    model = kind().double()
    return model, trace_forward(model, tokens(8), {})


@pytest.fixture(scope="module", params=[Fused, Grouped])
def traced(request):
    return _made(request.param)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(("size", "seeds"), [(2, range(4)), (4, range(4, 7)), (8, range(7, 8))])
def test_random_plans_give_the_outputs_and_gradients_of_one_process(traced, size, seeds):
    model, graph = traced
    for seed in seeds:
        parity = compare(model, graph, random_plan(graph, size, seed), (tokens(16), {}))
        assert parity.error < 1e-12, (seed, parity.worst)


def test_a_fault_in_a_rule_shows_in_random_plans(monkeypatch):
    monkeypatch.setattr(Functions, "once", lambda self, tensor: tensor)
    model, graph = _made(Fused)
    errors = [compare(model, graph, random_plan(graph, 2, seed), (tokens(8), {})).error for seed in range(2)]
    assert max(errors) > 1e-3
