"""Calls that get programs of their own, calls that fall back to eager, and the log lines about them."""

import logging

import pytest
import torch
from torch import nn

from nnx_core.communicator import GroupCommunicator
from nnx_nnscaler.compile.compiler import Compiler, ModelCall, ProgramForm
from nnx_nnscaler.compile.programs import Programs
from nnx_nnscaler.ir.placement import R
from nnx_nnscaler.plan.planning import plan_program, replicated_plan
from nnx_nnscaler.runtime.functions import Runtime

RUNS = []


def note(module, add=RUNS.append):
    add(id(module))


class Model(nn.Module):
    """Notes whenever its own forward runs, which a program does not repeat."""

    def __init__(self, function=torch.relu):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.function = function

    def forward(self, x, extra=None):
        note(self)
        return self.function(self.inner(x))


def attached(module, *args, planner=None, size=1):
    def replicate(graph, layout):
        return replicated_plan(graph, size)

    made = Programs(
        module,
        compiler=Compiler(form=ProgramForm(planner or replicate), size=size),
        runtime=Runtime(GroupCommunicator(None)),
        device=torch.device("cpu"),
    )
    made.prepare(ModelCall(args, {}))
    made.attach(dict(module.named_parameters()) | dict(module.named_buffers()))
    RUNS.clear()
    return made


def expected(module, x):
    return module.function(module.inner(x))


def test_calls_with_and_without_gradients_have_programs_of_their_own():
    module = Model(lambda x: x * 2 if torch.is_grad_enabled() else x * 3)
    made = attached(module, torch.randn(4, 4))
    x = torch.randn(6, 4)
    for _ in range(2):
        assert torch.equal(module(x), expected(module, x))
        with torch.no_grad():
            assert torch.equal(module(x), expected(module, x))
        with torch.inference_mode():
            assert torch.equal(module(x), expected(module, x))
    assert len(made.variants) == 2
    assert not [run for run in RUNS if run != id(module)]
    assert module(x).requires_grad


def test_calls_under_autocast_and_outside_have_programs_of_their_own():
    module = Model(lambda x: x.float() * 2 if torch.is_autocast_enabled("cpu") else x * 3)
    made = attached(module, torch.randn(4, 4))
    x = torch.randn(6, 4)
    for _ in range(2):
        assert torch.equal(module(x), expected(module, x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(module(x), expected(module, x))
    assert len(made.variants) == 2
    assert made.causes == []


def test_what_the_code_asks_of_a_batch_brings_about_another_program():
    module = Model()
    module.function = lambda x: x * 2 if x.shape[0] < 10 else x * 3
    made = attached(module, torch.randn(4, 4))
    for size in (4, 12, 7, 20):
        x = torch.randn(size, 4)
        assert torch.equal(module(x), expected(module, x))
    assert [compiled.graph.guards for compiled in made.variants] == [
        ("B < 10", "B <= 9"),
        ("B >= 10",),
    ]
    assert made.causes == []


def test_a_single_row_runs_whole_also_where_no_program_is_for_its_kind(caplog):
    module = Model(lambda x: x.squeeze(0))
    made = attached(module, torch.randn(4, 4))
    module.eval()
    x = torch.randn(1, 4)
    assert module(x).shape == (4,)
    assert "a size of 1" in caplog.text
    assert "a size of 1" in made.causes[0]


class Remembering(nn.Module):
    """Its first call sets an attribute, and further ones set it to the same."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.dtype = None

    def forward(self, x):
        y = self.inner(x)
        self.dtype = y.dtype
        return y


def test_programs_that_come_later_take_parameters_as_they_are(caplog):
    layouts = []

    def planner(graph, layout):
        layouts.append(layout)
        fixed = {} if layout is None else {"stored": layout.stored, "synchronized": layout.synchronized}
        return plan_program(graph, size=1, policy="tp", **fixed)

    module = Remembering()
    made = attached(module, torch.randn(4, 4), planner=planner)
    assert "its forward changes its attribute 'dtype'" in caplog.text
    assert layouts == []
    for _ in range(3):
        module(torch.randn(4, 4))
    (compiled,) = made.variants
    (layout,) = layouts
    assert layout.stored == {}
    assert layout.synchronized == frozenset()
    assert set(compiled.plan.stored.values()) == {R}
    assert compiled.plan.synchronized == frozenset()


@pytest.mark.parametrize("first", [True, False])
def test_an_argument_that_is_an_object_runs_whole_and_is_compiled_never(first, caplog):
    module, x = Model(), torch.randn(4, 4)
    made = attached(module, x, *([object()] if first else []))
    for _ in range(3):
        assert torch.equal(module(x, object()), expected(module, x))
    assert len(made.variants) == (0 if first else 1)
    assert caplog.text.count("neither a tensor nor a plain value") == 1
    assert made._refused == {}


def test_the_user_is_told_once_what_stays_whole_and_what_nobody_can_split(caplog):
    class Odd(Model):
        def __init__(self):
            super().__init__(nn.Identity())
            self.register_buffer("scale", torch.ones(3))
            self.constant = torch.ones(4)
            self.inner.register_forward_hook(lambda *_: None)

        def forward(self, x):
            return torch.linalg.matrix_exp(self.inner(x) * self.constant)

    with caplog.at_level(logging.WARNING, logger="nnx.nnscaler"):
        module = Odd()
        attached(module, torch.randn(4, 4), size=2)
        module.eval()
        module(torch.randn(4, 4))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told)) == 3
    hooked = "inner of Odd falls back to eager on every rank of its unit: it has forward or backward hooks"
    assert hooked in told
    assert any("constant is a tensor but no buffer" in text for text in told)
    assert any("aten.linalg_matrix_exp.default" in text for text in told)


class Region(nn.Module):
    """A part that computes in float32 under autocast, and one that keeps gradients out."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        y = self.first(x)
        with torch.autocast("cpu", enabled=False):
            y = self.second(y.float() + 1e-3)
        with torch.no_grad():
            z = self.third(y)
        return y.float() * z.float()


class Regions(nn.Module):
    """Blocks that are written once in a program."""

    def __init__(self, hooked):
        super().__init__()
        self.blocks = nn.ModuleList(Region() for _ in range(3))
        for block in self.blocks if hooked else ():
            block.third.register_forward_hook(lambda *_: None)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("hooked", [False, True])
def test_regions_of_autocast_and_without_gradients_are_those_of_the_forward(hooked):
    module, own = Regions(hooked), Regions(hooked)
    own.load_state_dict(module.state_dict())
    made = attached(module, torch.randn(4, 4))
    x = torch.randn(6, 4)
    results = []
    for model in (module, own):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = model(x)
        result.sum().backward()
        results.append((result.detach(), {name: p.grad for name, p in model.named_parameters()}))
    (found, gradients), (wanted, expected_gradients) = results
    assert torch.equal(found, wanted)
    for name, gradient in expected_gradients.items():
        assert (gradient is None) == (".third." in name)
        assert gradient is None or torch.allclose(gradients[name], gradient, rtol=1e-6, atol=1e-7), name
        assert (gradients[name] is None) == (gradient is None)
    compiled = made.variants[-1]
    assert 'with torch.autocast("cpu", enabled=False):' in compiled.source
    assert ("with torch.no_grad():" in compiled.source) == hooked
