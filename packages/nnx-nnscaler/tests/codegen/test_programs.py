"""Programs replace a module's forward: each call gets the matching program, or the module's own forward."""

import copy
import dataclasses
import inspect
import logging
import pickle
import sys
import traceback

import pytest
import torch
from torch import nn

from jobs.nnscaler_codegen_models import ConvNet, images
from nnx_core.communicator import GroupCommunicator
from nnx_core.errors import PlanError, UnsupportedError
from nnx_nnscaler.compile import programs as programs_module
from nnx_nnscaler.compile.compiler import Compiler, ModelCall, ProgramForm, code_digest
from nnx_nnscaler.compile.programs import Programs
from nnx_nnscaler.compile.store import Store
from nnx_nnscaler.ir.placement import R
from nnx_nnscaler.plan.planning import replicated_plan
from nnx_nnscaler.runtime.functions import Runtime


def replicate(graph, layout):
    return replicated_plan(graph, 1)


def weights_of(module):
    return dict(module.named_parameters(remove_duplicate=False)) | dict(
        module.named_buffers(remove_duplicate=False)
    )


def attached(module, *args, planner=replicate, store=None, reuse="match", **kwargs):
    """A module with programs in place of its forward, compiled for a first call."""
    made = Programs(
        module,
        compiler=Compiler(
            form=ProgramForm(planner), size=1, store=store, reuse=reuse, identity={"policy": "whole"}
        ),
        runtime=Runtime(GroupCommunicator(None)),
        device=torch.device("cpu"),
    )
    made.prepare(ModelCall(args, kwargs))
    made.attach(weights_of(module))
    return made


CALLS = []


def note(module, add=CALLS.append):  # so that tracing does not notice it: a forward with effects falls back
    add(id(module))


class Counting(nn.Module):
    """Notes whenever its own forward runs."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x, scale=1.0, *, shift=None):
        note(self)
        y = self.inner(x) * scale
        y = torch.relu(y) if self.training else y
        return y if shift is None else y + shift


@pytest.fixture
def counting():
    module = Counting()
    made = attached(module, torch.randn(4, 4))
    CALLS.clear()
    return module, made


def fresh(module):
    """The same module with its own forward."""
    other = Counting()
    other.load_state_dict(module.state_dict())
    return other.train(module.training)


def test_a_call_that_fits_runs_the_program(counting):
    module, made = counting
    x = torch.randn(6, 4)
    assert torch.equal(module(x), fresh(module)(x))
    assert id(module) not in CALLS
    assert len(made.variants) == 1


def test_arguments_by_name_and_by_position_share_a_program(counting):
    module, made = counting
    x = torch.randn(4, 4)
    assert torch.equal(module(x=x), module(x))
    assert len(made.variants) == 1


def test_other_values_modes_and_arguments_get_programs_of_their_own(counting):
    module, made = counting
    x = torch.randn(4, 4)
    for call in (lambda m: m(x, 2.0), lambda m: m(x, shift=torch.ones(3)), lambda m: m.eval()(x)):
        own = fresh(module)
        count = len(made.variants)
        assert torch.equal(call(module), call(own))
        assert len(made.variants) == count + 1
        assert torch.equal(call(module), call(own))
        assert len(made.variants) == count + 1


def test_training_and_evaluation_each_take_their_branch(counting):
    module, _ = counting
    x = torch.randn(64, 4)
    for _ in range(2):
        for mode in (True, False):
            module.train(mode)
            assert torch.equal(module(x), fresh(module)(x))
            assert (module(x) >= 0).all() == mode


def test_gradients_reach_the_users_parameters(counting):
    module, _ = counting
    x = torch.randn(4, 4)
    own = fresh(module)
    module(x).sum().backward()
    own(x).sum().backward()
    assert torch.equal(module.inner.weight.grad, own.inner.weight.grad)


def test_a_batch_of_one_runs_whole_and_says_so_once(counting, caplog):
    module, made = counting
    own = fresh(module)
    x = torch.randn(1, 4)
    with caplog.at_level(logging.WARNING, logger="nnx.nnscaler"):
        for _ in range(3):
            assert torch.equal(module(x), own(x))
    assert len(caplog.records) == 1
    assert "Counting falls back to eager on every rank of its unit" in caplog.text
    assert "size of 1" in caplog.text
    assert len(made.variants) == 1


def test_a_first_batch_of_one_has_a_program_of_its_own():
    module = Counting()
    made = attached(module, torch.randn(1, 4))
    assert torch.equal(module(torch.ones(1, 4)), fresh(module)(torch.ones(1, 4)))
    assert torch.equal(module(torch.ones(5, 4)), fresh(module)(torch.ones(5, 4)))
    assert len(made.variants) == 2


def test_a_batch_that_the_plan_cannot_divide_runs_whole(caplog):
    def divided(graph, layout):
        return dataclasses.replace(replicated_plan(graph, 1), divisible=(("B", 2), ("3*B", 6)))

    module = Counting()
    made = attached(module, torch.randn(4, 4), planner=divided)
    CALLS.clear()
    x = torch.randn(3, 4)
    assert torch.equal(module(x), fresh(module)(x))
    assert CALLS.count(id(module)) == 1
    assert "B = 3 is not a multiple of 2" in caplog.text
    module(torch.randn(8, 4))
    assert CALLS.count(id(module)) == 1
    assert len(made.variants) == 1


def test_what_cannot_be_traced_runs_whole_and_names_the_line(caplog):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            if x.sum() > 0:
                return x * self.weight
            return -x

    module = Branching()
    made = attached(module, torch.ones(4, 4))
    assert made.variants == []
    assert made.layout.stored == {}
    assert torch.equal(module(torch.ones(4, 4)), torch.ones(4, 4))
    assert torch.equal(module(-torch.ones(4, 4)), torch.ones(4, 4))
    assert "if x.sum() > 0" in caplog.text
    assert len(made.causes) == 1


def test_what_fails_to_compile_unforeseen_runs_whole_and_says_why(caplog):
    def broken(graph, layout):
        raise IndexError("tuple index out of range")

    module = Counting()
    inputs = torch.randn(3, 4)
    expected = module(inputs)
    with caplog.at_level(logging.WARNING, "nnx.nnscaler"):
        attached(module, inputs, planner=broken)
    assert torch.equal(module(inputs), expected)
    assert "IndexError: tuple index out of range" in caplog.text


def test_a_hook_on_a_submodule_is_honoured(counting):
    module, _ = counting
    x, seen = torch.randn(4, 4), []
    handle = module.inner.register_forward_hook(lambda *args: seen.append(1))
    assert torch.equal(module(x), fresh(module)(x))
    assert seen
    handle.remove()
    seen.clear()
    module(x)
    assert not seen


def test_hooks_on_the_root_run_around_the_program(counting):
    module, made = counting
    module.register_forward_hook(lambda m, args, result: result * 0)
    assert not module(torch.randn(4, 4)).any()
    assert len(made.variants) == 1


def test_a_hook_on_all_modules_sees_them(counting):
    module, _ = counting
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(type(m)))
    try:
        module(torch.randn(4, 4))
    finally:
        handle.remove()
    assert nn.Linear in seen


@pytest.mark.parametrize("change", ["submodule", "parameter"])
def test_a_changed_tree_is_not_run_with_the_old_program(counting, caplog, change):
    module, _ = counting
    if change == "submodule":
        module.inner = nn.Linear(4, 3)
    else:
        module.inner.weight = nn.Parameter(torch.zeros(3, 4))
    x = torch.randn(4, 4)
    assert torch.equal(module(x), fresh(module)(x))
    assert "was replaced after planning" in caplog.text


def test_wrong_arguments_raise_what_the_forward_raises(counting):
    module, _ = counting
    with pytest.raises(TypeError, match="unexpected keyword argument 'nothing'"):
        module(torch.randn(4, 4), nothing=1)


def test_after_the_last_of_many_programs_calls_run_whole(counting, monkeypatch, caplog):
    monkeypatch.setattr(programs_module, "MOST_VARIANTS", 2)
    module, made = counting
    x = torch.randn(4, 4)
    for scale in (2.0, 3.0, 4.0):
        assert torch.equal(module(x, scale), fresh(module)(x, scale))
    assert len(made.variants) == 2
    assert "2 programs were compiled or tried already" in caplog.text


def test_what_is_refused_twice_for_one_cause_is_not_tried_again(counting, monkeypatch):
    module, _ = counting
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise UnsupportedError("it is so.", remedy="None.")

    monkeypatch.setattr(programs_module, "compile_together", refuse)
    for scale in (2.0, 3.0, 4.0, 5.0):
        assert torch.equal(module(torch.ones(4, 4), scale), fresh(module)(torch.ones(4, 4), scale))
    assert len(tried) == 2


def test_a_copy_of_the_module_has_its_own_forward(counting):
    module, _ = counting
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.inner.weight.zero_()
        other.inner.bias.zero_()
    x = torch.randn(64, 4)
    assert not other(x).any()
    assert module(x).any()
    assert [id(other)] == CALLS


def test_a_module_with_programs_can_be_pickled(counting):
    module, _ = counting
    other = pickle.loads(pickle.dumps(module))
    x = torch.randn(4, 4)
    assert torch.equal(other(x), module(x))


def test_detaching_gives_the_forward_back(counting):
    module, made = counting
    assert list(inspect.signature(module.forward).parameters) == ["x", "scale", "shift"]
    made.detach()
    assert "forward" not in module.__dict__
    module(torch.randn(4, 4))
    assert [id(module)] == CALLS


def test_a_forward_that_was_set_on_the_instance_comes_back():
    module = nn.Linear(4, 4)
    module.forward = lambda x: x + 1
    own = module.forward
    made = attached(module, torch.ones(2, 4))
    assert torch.equal(module(torch.ones(2, 4)), torch.full((2, 4), 2.0))
    made.detach()
    assert module.forward is own


def test_an_error_in_a_program_shows_its_line(counting):
    module, made = counting
    made._weights = {}
    with pytest.raises(KeyError) as caught:
        module(torch.randn(4, 4))
    assert 'w["inner.weight"]' in "".join(traceback.format_tb(caught.value.__traceback__))


def test_dicts_and_labels_that_may_be_missing():
    module = ConvNet()
    pictures, labels = images()
    made = attached(module, pictures, labels)
    own = ConvNet()
    own.load_state_dict(module.state_dict())
    for call in ((pictures, labels), (pictures,), images(6)):
        mine, its = module(*call), own(*call)
        assert mine.keys() == its.keys()
        assert torch.equal(mine["logits"], its["logits"])
        assert (mine["loss"] is None) == (its["loss"] is None)
    assert len(made.variants) == 2
    assert torch.equal(module.norm.running_mean, own.norm.running_mean)
    assert int(module.norm.num_batches_tracked) == 3


@pytest.mark.full
def test_the_look_up_of_a_program_makes_few_calls():
    module = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(33)])
    made = attached(module, torch.randn(2, 2))
    assert len(list(module.modules())) == 100
    x, calls = torch.randn(2, 2), []
    sys.setprofile(lambda _, event, __: calls.append(event) if event in ("call", "c_call") else None)
    try:
        made._find(ModelCall((x,), {}))
    finally:
        sys.setprofile(None)
    print(len(calls))
    assert 0 < len(calls) < 500


# --- kept programs --------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, owner="tests.Stack")


class Traces:
    """Counts how often something is traced and planned."""

    def __init__(self, monkeypatch):
        import nnx_nnscaler.compile.compiler as compiling

        self.traced = self.planned = 0
        original = compiling.trace_forward

        def trace(*args, **kwargs):
            self.traced += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(compiling, "trace_forward", trace)

    def planner(self, graph, layout):
        self.planned += 1
        return replicated_plan(graph, 1)


@pytest.fixture
def traces(monkeypatch):
    return Traces(monkeypatch)


class Stack(nn.Module):
    """Layers that can be had in several forms."""

    def __init__(self, layers=1, slope=0.0):
        super().__init__()
        self.layers, self.slope = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers)), slope

    def forward(self, x, labels=None):
        for layer in self.layers:
            x = torch.where(x > 0, layer(x), self.slope)
        return x if labels is None else (x - labels).square().mean()


@pytest.mark.parametrize(
    ("reuse", "traced", "planned"), [("match", 1, 1), ("moo", 1, 1), ("override", 2, 2), ("graph", 1, 2)]
)
def test_what_is_used_again(store, traces, reuse, traced, planned):
    x = torch.ones(4, 4)
    for _ in range(2):
        module = Stack()
        made = attached(module, x, store=store, planner=traces.planner, reuse=reuse)
        expected = Stack()
        expected.load_state_dict(module.state_dict())
        assert torch.equal(module(x), expected(x))
    assert (traces.traced, traces.planned) == (traced, planned)
    assert made.variants[0].path == next(store.folder.glob("*/forward.py"))
    assert len(list(store.folder.iterdir())) == 1


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("change", "reuse"),
    [*((change, "match") for change in ("layers", "slope", "mode", "labels", "frozen", "shape")),
     ("slope", "moo"), ("slope", "graph")],
)  # fmt: skip
def test_another_model_never_gets_an_old_program(store, traces, change, reuse):
    x = torch.ones(4, 4)
    attached(Stack(), x, store=store, planner=traces.planner)
    other = {"layers": {"layers": 2}, "slope": {"slope": 0.5}}.get(change, {})
    module, expected = Stack(**other), Stack(**other)
    expected.load_state_dict(module.state_dict())
    if change == "mode":
        module.eval()
    if change == "frozen":
        module.layers[0].bias.requires_grad_(False)
    call = {"labels": (x, x), "shape": (torch.ones(4, 3, 4),)}.get(change, (x,))
    attached(module, *call, store=store, planner=traces.planner, reuse=reuse)
    assert traces.traced == 2
    assert torch.equal(module(*call), expected(*call))


def test_an_edited_program_is_refused_or_made_anew(store, traces, caplog):
    attached(Stack(), torch.ones(4, 4), store=store, planner=traces.planner)
    path = next(store.folder.glob("*/forward.py"))
    good = path.read_text()
    path.write_text(good.replace("return", "return 0 *"))
    with pytest.raises(PlanError, match=r"cannot reuse .*forward\.py: it was changed"):
        attached(Stack(), torch.ones(4, 4), store=store, planner=traces.planner)
    attached(Stack(), torch.ones(4, 4), store=store, planner=traces.planner, reuse="moo")
    assert "Compiled again" in caplog.text
    assert path.read_text() == good


def test_weights_are_never_kept(store):
    module = Stack()
    with torch.no_grad():
        module.layers[0].weight.fill_(0.123456789)
    attached(module, torch.ones(4, 4), store=store)
    kept = "".join(path.read_text() for path in store.folder.rglob("*.*"))
    assert "0.1234" not in kept


def test_the_kept_file_is_the_code_that_runs(store):
    module = Stack()
    made = attached(module, torch.ones(4, 4), store=store)
    program = made.variants[0].program
    assert inspect.getsourcefile(program) == str(made.variants[0].path)
    assert "def forward(rt, m, w, c, x)" in inspect.getsource(program)


def test_a_layout_is_part_of_what_a_later_program_is_made_from(store):
    module = Stack()
    made = attached(module, torch.ones(4, 4), store=store)
    assert made.layout.stored["layers.0.weight"] == R
    module.eval()
    module(torch.ones(4, 4))
    metas = {path.parent.name: path.read_text() for path in store.folder.glob("*/meta.json")}
    assert len(metas) == 2
    assert sorted('"layout": ""' in text for text in metas.values()) == [False, True]


def test_functions_are_told_apart_by_their_code():
    def first(graph, size):
        return "a" in {"a", "b"}

    def second(graph, size):
        return "a" in {"a", "c"}

    again = {"first": first}["first"]
    assert code_digest(first) == code_digest(again) != code_digest(second)
    assert code_digest(first).startswith(f"{__name__}.")
