"""Every model under every policy in float64, where rounding cannot hide an error: 2, 4 and 8 ranks.

Outputs, all gradients and all buffers of a unit's program equal the plain module's. The ranks are threads.
"""

import dataclasses
from functools import cache

import pytest
import torch

from jobs.nnscaler_models import MODELS
from nnx_core.machine.hardware import Link, profile
from nnx_nnscaler.parity import compare, precise
from nnx_nnscaler.plan.cost import CostModel
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.trace import trace_forward

BOUND = 1e-12
FREE = Link(latency=0.0, bandwidth=1e18)
CHEAP = dataclasses.replace(profile("cpu"), name="cheap links", overhead=0.0, inside=FREE, across=FREE)
"""Links that cost nothing, so that autodist splits models as small as these."""


@cache
def traced(name):
    """A model in float64, its graph, and the call that was traced."""
    module = MODELS[name](1).double().train()
    batch = {
        key: value.double() if value.is_floating_point() else value
        for key, value in module.batches[0].items()
    }
    names = module.forward.__code__.co_varnames
    call = ((), {key: value for key, value in batch.items() if key in names})
    with precise(torch.float64):
        return module, trace_forward(module, *call), call


@pytest.mark.quick(every=68, first=34)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("policy", ["data", "zero", "tp", "autodist"])
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"plain_gpt"}))
def test_a_unit_computes_what_one_process_computes(name, policy, size):
    module, graph, call = traced(name)
    plan = plan_program(graph, size=size, policy=policy, costs=CostModel(hardware=CHEAP))
    with precise(torch.float64):
        found = compare(module, graph, plan, call)
    assert found.error < BOUND, found.worst
    if size == 2:
        assert any(not choice.is_replicated for choice in plan.choices.values())
