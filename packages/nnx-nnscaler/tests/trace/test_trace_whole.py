"""Untraceable modules are named, and fall back to eager."""

import random

import numpy
import pytest
import torch
from torch import nn

from jobs.nnscaler_interpreter import check_graph
from jobs.nnscaler_trace_models import (
    Branching,
    BranchingRoot,
    Mixture,
    Mlp,
    Remembers,
    Rounding,
    Twice,
    WithRecomputing,
)
from nnx_core.view.guard import guard
from nnx_nnscaler.ir.placement import S
from nnx_nnscaler.runtime.part import LocalPart, ParameterLayout, Part
from nnx_nnscaler.trace import TraceError, fingerprint, trace_forward


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def whole(graph):
    return [op.module for op in graph.ops if op.target == "module"]


def check(module, *, rows=(4, 3, 6)):
    graph = trace_forward(module, (torch.randn(4, 8),))
    for size in rows:
        check_graph(graph, module, (torch.randn(size, 8),))
    return graph


class Around(nn.Module):
    """A submodule between two layers."""

    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def test_sizes_that_depend_on_data_keep_their_submodule_whole():
    graph = check(Mixture())
    assert whole(graph) == ["moe"]
    assert list(graph.kept) == ["moe"]
    assert "depends on the values of a tensor" in graph.kept["moe"]
    assert "nnscaler_trace_models.py" in graph.kept["moe"]
    assert "moe.gate.weight" not in graph.parameters.values()


def test_branches_that_depend_on_data_keep_their_submodule_whole():
    graph = check(Branching())
    (op,) = [op for op in graph.ops if op.target == "module"]
    assert (op.module, op.kwargs, op.output[1]) == ("branch", {"factor": 3.0}, None)
    assert "if x.sum() > 0" in graph.kept["branch"]
    assert [o.target for o in graph.ops] == [
        "aten.linear.default",
        "module",
        "getitem",
        "aten.linear.default",
    ]


def test_a_root_that_cannot_be_traced_is_refused_with_its_line():
    message = (
        r"BranchingRoot cannot be traced: its control .*\(nnscaler_trace_models.py:\d+: if x.sum\(\) > 0:\)"
    )
    with pytest.raises(TraceError, match=message) as error:
        trace_forward(BranchingRoot(), (torch.randn(3, 4),))
    assert "torch.where instead of a branch" in error.value.remedy


@pytest.mark.full
def test_siblings_of_a_class_that_fails_are_kept_at_once(monkeypatch):
    from nnx_nnscaler.trace import forward

    calls = []
    real = forward.export_forward
    monkeypatch.setattr(forward, "export_forward", lambda *args: calls.append(1) or real(*args))
    module = nn.Sequential(*[Around(Mixture().moe) for _ in range(4)])
    graph = check(module, rows=(5,))
    assert whole(graph) == [f"{i}.inner" for i in range(4)]
    assert len(calls) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_within_forward_is_honoured(reentrant):
    graph = check(WithRecomputing(reentrant))
    assert whole(graph) == ["block"]
    assert "torch.utils.checkpoint" in graph.kept["block"]
    assert "checkpoint(self.inner, x, use_reentrant=self.reentrant)" in graph.kept["block"]


def test_a_checkpoint_is_no_matter_in_eval():
    graph = trace_forward(WithRecomputing().eval(), (torch.randn(4, 8),))
    assert whole(graph) == []


def test_a_checkpoint_in_the_root_is_refused():
    with pytest.raises(TraceError, match=r"Recomputing cannot be traced: it calls torch.utils.checkpoint"):
        trace_forward(WithRecomputing().block, (torch.randn(4, 8),))


def test_a_submodule_with_hooks_is_kept_and_its_hooks_do_not_run_in_a_trace():
    module, seen = Mlp(), []
    module.second.register_forward_hook(lambda _, args, result: seen.append(type(result)))
    graph = trace_forward(module, (torch.randn(4, 8),))
    assert not seen  # a trace is no call
    assert graph.kept == {"second": "it has forward or backward hooks"}
    seen.clear()
    check_graph(graph, module, (torch.randn(3, 8),))
    assert len(seen) == 2


@pytest.mark.parametrize("register", ["register_forward_pre_hook", "register_full_backward_hook"])
def test_other_kinds_of_hooks_count_too(register):
    module = Mlp()
    getattr(module.first, register)(lambda *_: None)
    assert list(trace_forward(module, (torch.randn(4, 8),)).kept) == ["first"]


def test_a_custom_backward_is_not_lost():
    graph = check(Around(Rounding()))
    assert whole(graph) == ["inner"]
    assert "StraightThrough" in graph.kept["inner"]


def test_a_submodule_that_leaves_results_on_itself_is_kept_and_left_as_it_was():
    module = Twice()
    graph = trace_forward(module, (torch.randn(4, 8),))
    assert module.inner.last is None
    assert module.inner.calls == []
    assert whole(graph) == ["inner", "inner"]
    check_graph(graph, module, (torch.randn(3, 8),))
    assert module.inner.last.shape == (3, 8)


def test_a_root_that_leaves_results_on_itself_is_refused():
    module = Remembers()
    with pytest.raises(TraceError, match="Remembers cannot be traced: its forward changes its attribute"):
        trace_forward(module, (torch.randn(4, 8),))
    assert (module.last, module.calls) == (None, [])


def test_a_buffer_that_is_replaced_is_honoured():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count = self.count + 1
            return x * self.count

    module = Around(Counter())
    graph = trace_forward(module, (torch.randn(4, 8),))
    assert module.inner.count == 0
    assert whole(graph) == ["inner"]
    check_graph(graph, module, (torch.randn(4, 8),))


def test_a_submodule_that_writes_into_a_parameter_or_an_input_is_kept():
    class Clamping(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))

        def forward(self, x):
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
            return x * self.weight

    graph = trace_forward(Around(Clamping()), (torch.randn(4, 8),))
    assert "writes in place into a parameter" in graph.kept["inner"]

    class Scribbling(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    with pytest.raises(TraceError, match="writes in place into an input"):
        trace_forward(Scribbling(), (torch.randn(4, 8),))


def test_a_result_that_cannot_be_made_again_keeps_the_parent_whole():
    class Odd:
        def __init__(self, x):
            self.x = x

    class Boxed(nn.Module):
        def forward(self, x):
            if x.sum() > 0:
                return Odd(x)
            return Odd(-x)

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.boxed = Boxed()

        def forward(self, x):
            return self.boxed(x).x * 2

    graph = check(Around(Parent()))
    assert whole(graph) == ["inner"]


def test_dicts_and_nested_results_of_whole_submodules_are_taken_apart():
    class Rich(nn.Module):
        def forward(self, x, extra):
            if x.sum() > 0:
                x = x * 2
            return {"x": x, "more": [(x.sum(0), None), extra["n"]]}

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.rich = Rich()

        def forward(self, x):
            found = self.rich(x, extra={"n": x.shape[0]})
            return found["x"] + found["more"][0][0] * found["more"][1]

    graph = trace_forward(Around(Uses()), (torch.randn(4, 8),))
    assert whole(graph) == ["inner.rich"] or whole(graph) == ["inner"]
    check_graph(graph, Around(Uses()), (torch.randn(4, 8),))


def test_random_numbers_outside_torch_are_noticed_and_put_back():
    class Dropping(nn.Module):
        def forward(self, x):
            return x if random.random() < 0.5 else x * numpy.random.rand()

    before = random.getstate()
    with pytest.raises(TraceError, match="draws from the generators of Python or numpy"):
        trace_forward(Dropping(), (torch.randn(4, 8),))
    assert random.getstate() == before


def test_logging_in_forward_is_refused():
    lightning = pytest.importorskip("lightning.pytorch")

    class Logging(lightning.LightningModule):
        def forward(self, x):
            self.log("x", x.mean())
            return x

    module = Logging()
    with pytest.raises(TraceError, match="logs within the forward"):
        trace_forward(module, (torch.randn(4, 8),))
    assert "log" not in vars(module)


@pytest.mark.full
def test_tracing_leaves_nothing_behind():
    module = nn.Sequential(Mixture(), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.LSTM(2, 2))
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    flags = [submodule.training for submodule in module.modules()]
    classes = [type(submodule) for submodule in module.modules()]
    sample = torch.randn(4, 8)
    random_state = torch.get_rng_state()
    trace_forward(module, (sample,))
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
    assert [submodule.training for submodule in module.modules()] == flags
    assert [type(submodule) for submodule in module.modules()] == classes
    assert all(type(weight) is nn.Parameter for weight in module[3]._flat_weights)
    assert all(parameter.grad is None for parameter in module.parameters())
    check_graph(trace_forward(module, (torch.randn(4, 8),)), module, (torch.randn(4, 8),))


def test_a_module_on_meta_whose_submodule_must_stay_whole_is_refused():
    with torch.device("meta"):
        module = Mixture()
    with pytest.raises(
        TraceError, match=r"moe must run in eager mode .* on the meta device, .* Create the module on a real"
    ):
        trace_forward(module, (torch.randn(4, 8),))


def test_what_a_submodule_returns_is_found_out_without_values_where_it_does_not_depend_on_them():
    with torch.device("meta"):
        module = Around(nn.Linear(8, 8))
    module.inner.register_forward_hook(lambda module, args, output: None)
    graph = trace_forward(module, (torch.randn(4, 8),))
    assert whole(graph) == ["inner"]
    assert all(parameter.is_meta for parameter in module.parameters())
    real = Around(nn.Linear(8, 8))
    check_graph(graph, real, (torch.randn(3, 8),))


def test_a_forward_that_fails_on_the_sample_says_where():
    class Failing(Mixture):
        def forward(self, x):
            return super().forward(x) + torch.zeros(3, 3)

    with pytest.raises(TraceError, match=r"fails on the sample: .*|cannot be traced: .*"):
        trace_forward(Failing(), (torch.randn(4, 8),))


class Unreachable:
    """Collectives that no trace may call: it runs on one rank only."""

    size, rank = 2, 0

    def __getattr__(self, name):
        raise AssertionError(f"a trace called {name}")


@pytest.mark.parametrize("make", [Mlp, Mixture])
def test_parameters_in_parts_are_traced_as_wholes_without_a_collective(make):
    module = make()
    expected = trace_forward(module, (torch.randn(4, 8),))
    key = fingerprint(module, (torch.randn(4, 8),))
    parameter = module.first.weight
    layout = ParameterLayout(shape=tuple(parameter.shape), placement=S(0), unit_rank=0, unit_size=2)
    parameter.data = parameter.data[: len(parameter) // 2].clone()
    guard(parameter, Part(parameter, layout, unit=Unreachable(), source=LocalPart(parameter)))
    graph = trace_forward(module, (torch.randn(4, 8),))
    assert graph == expected
    assert fingerprint(module, (torch.randn(4, 8),)) == key
    assert module.first.weight is parameter
