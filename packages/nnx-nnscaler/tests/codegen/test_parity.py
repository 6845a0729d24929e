"""Programs compute the results of the modules, where rounding cannot hide an error."""

import dataclasses

import pytest
import torch
from torch import nn

from jobs.nnscaler_codegen_models import GPT, ConvNet, Mixture, images, tokens
from nnx_nnscaler.ir.placement import P, R, S, Strategy
from nnx_nnscaler.parity import check_parity, compare
from nnx_nnscaler.plan.planning import plan_program, replicated_plan
from nnx_nnscaler.runtime.functions import Conversions
from nnx_nnscaler.trace import trace_forward

POLICIES = ("data", "zero", "tp", "autodist")
SIZES = (2, 4, 8)
BOUND = 1e-12


def made(seed, make):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


@pytest.fixture(scope="module")
def gpt():
    """A graph of a GPT with dropout, traced once."""
    module = made(1, lambda: GPT(heads=8, dropout=0.1)).double()
    call = ((tokens(8),), {"labels": tokens(8, seed=1)})
    return module, trace_forward(module, *call), call


@pytest.fixture(scope="module")
def convnet():
    module = made(2, ConvNet).double()
    pictures, labels = images(8)
    call = ((pictures.double(), labels), {})
    return module, trace_forward(module, *call), call


@pytest.mark.quick(every=15)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_gpt_with_tied_weights_and_dropout(gpt, policy, size):
    module, graph, call = gpt
    found = compare(module, graph, plan_program(graph, size=size, policy=policy), call)
    assert found.error < BOUND, found.worst


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_convolutional_net_with_batch_norm(convnet, policy, size):
    module, graph, call = convnet
    found = compare(module, graph, plan_program(graph, size=size, policy=policy), call)
    assert found.error < BOUND, found.worst


@pytest.mark.parametrize("policy", ["data", "tp"])
def test_layers_are_split_around_one_that_cannot_be_traced(policy):
    found = check_parity(made(3, Mixture), (torch.randn(8, 8),), size=2, policy=policy)
    assert found.error < BOUND, found.worst
    assert "rt.run(m.get_submodule('experts')" in found.source
    assert any(not choice.is_replicated for choice in found.plan.choices.values())


@pytest.mark.parametrize("batch", [2, 6, 12])
def test_a_batch_of_another_size_than_was_traced(gpt, batch):
    module, graph, _ = gpt
    found = compare(
        module,
        graph,
        plan_program(graph, size=2, policy="data"),
        ((tokens(batch), tokens(batch, seed=3)), {}),
    )
    assert found.error < BOUND


@pytest.mark.full
@pytest.mark.parametrize("pattern", ["blocks.*", "blocks.*.mlp", "blocks.1.attention"])
def test_recomputed_submodules_change_nothing(pattern):
    call = (tokens(), tokens(seed=1))
    found = check_parity(made(4, GPT), call, size=2, policy="tp", recompute=[pattern])
    assert "rt.recomputed(" in found.source
    assert found.error < BOUND, found.worst


def test_a_submodule_that_writes_to_buffers_is_not_recomputed(caplog):
    pictures, labels = images()
    found = check_parity(
        made(2, ConvNet), (pictures, labels), size=2, policy="data", recompute=["norm", "conv"]
    )
    assert "recomputed(conv" in found.source
    assert "recomputed(norm" not in found.source
    assert "skip norm, because it writes to a buffer" in caplog.text
    assert found.error < BOUND


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4, dtype=torch.float64))
        self.scale = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight) * self.scale


def planned(choices, *, stored=None, synchronized=()):
    """A plan of `Linear` with these strategies of its two operators."""
    module, call = made(5, Linear), ((made(6, lambda: torch.randn(4, 4, dtype=torch.float64)),), {})
    graph = trace_forward(module, *call)
    names = [op.name for op in graph.ops]
    plan = dataclasses.replace(
        replicated_plan(graph, 2),
        choices=dict(zip(names, choices, strict=True)),
        stored={"weight": R, "scale": R} | (stored or {}),
        synchronized=frozenset(synchronized),
    )
    return compare(module, graph, plan, call)


ROWS = Strategy("batch", (S(0), R), (S(0),))
COLUMNS = Strategy("column", (R, S(0)), (S(1),))
INNER = Strategy("row", (S(1), S(1)), (P,))
WHOLE = Strategy("replicate", (R, R), (R,))
SCALED_COLUMNS = Strategy("column", (S(1), S(0)), (S(1),))
SCALED_SUM = Strategy("sum", (P, R), (P,))
SCALED_ROWS = Strategy("batch", (S(0), R), (S(0),))
LAYOUTS = {
    "rows": ([ROWS, SCALED_ROWS], {}, ()),
    "rows, summed by the reducer": ([ROWS, SCALED_ROWS], {}, ("weight", "scale")),
    "rows of gathered weights": ([ROWS, SCALED_ROWS], {"weight": S(1), "scale": S(0)}, ()),
    "rows, then whole": ([ROWS, WHOLE], {}, ()),
    "rows, then whole by the reducer": ([ROWS, WHOLE], {}, ("weight", "scale")),
    "columns": ([COLUMNS, SCALED_COLUMNS], {"weight": S(0), "scale": S(0)}, ()),
    "columns of whole weights": ([COLUMNS, SCALED_COLUMNS], {}, ()),
    "columns of whole weights by the reducer": ([COLUMNS, SCALED_COLUMNS], {}, ("weight", "scale")),
    "columns of weights that lie otherwise": ([COLUMNS, SCALED_COLUMNS], {"weight": S(1)}, ()),
    "columns, then rows": ([COLUMNS, SCALED_ROWS], {"weight": S(0)}, ("scale",)),
    "sums": ([INNER, SCALED_SUM], {"weight": S(1)}, ()),
    "sums, then rows": ([INNER, SCALED_ROWS], {"weight": S(1)}, ("scale",)),
    "sums, then whole": ([INNER, WHOLE], {}, ("weight",)),
    "whole of weights in parts": ([WHOLE, WHOLE], {"weight": S(0), "scale": S(0)}, ()),
}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_change_of_placement_keeps_values_and_gradients(layout):
    choices, stored, synchronized = LAYOUTS[layout]
    found = planned(choices, stored=stored, synchronized=synchronized)
    assert found.error < BOUND, found.source


def test_a_strategy_that_takes_a_value_for_a_sum_is_found_out():
    found = planned([Strategy("wrong", (R, R), (P,)), WHOLE])
    assert found.output > 0.1


@pytest.mark.parametrize(
    ("method", "layout"),
    [
        ("keep__all_reduce", "rows"),
        ("keep__divide", "rows, then whole by the reducer"),
        ("split__all_gather", "columns of whole weights"),
        ("all_gather__reduce_scatter", "rows of gathered weights"),
        ("all_reduce__keep", "sums, then whole"),
        ("all_to_all__all_to_all", "columns, then rows"),
    ],
)
def test_a_missing_collective_in_backward_is_found_out(monkeypatch, method, layout):
    original = getattr(Conversions, method)
    seen = []

    def broken(self, tensor, *args, **kwargs):
        seen.append(method)
        gradient_lost = original(self, tensor, *args, **kwargs) * 1.5
        return (gradient_lost - 0.5 * original(self, tensor.detach(), *args, **kwargs)).clone()

    monkeypatch.setattr(Conversions, method, broken)
    choices, stored, synchronized = LAYOUTS[layout]
    found = planned(choices, stored=stored, synchronized=synchronized)
    assert seen
    assert found.output < BOUND
    assert found.gradient > 1e-3


class Odd(nn.Module):
    """A sum over a parameter whose sizes no number of ranks divides, and sparse gradients."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.table = nn.Embedding(5, 8, sparse=True)
        self.odd = nn.Parameter(torch.ones(3, 5))

    def forward(self, x, index):
        return self.second(self.first(x) + self.table(index)) + self.odd.neg().sum()


@pytest.mark.parametrize("size", [2, 4])
def test_partial_sums_of_a_whole_parameter_and_sparse_gradients(size):
    call = ((torch.ones(8, 8, dtype=torch.float64), torch.arange(8) % 5), {})
    module = made(4, Odd).double()
    graph = trace_forward(module, *call)
    found = compare(module, graph, plan_program(graph, size=size, policy="tp"), call)
    assert found.error < BOUND, found.worst
