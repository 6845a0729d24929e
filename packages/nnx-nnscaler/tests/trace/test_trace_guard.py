"""A trace never waits for other ranks, calls hooks, or sees another grad mode than its caller."""

import os
import threading
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn
from torch import nn
from torch.nn.modules import module as torch_module

from jobs.nnscaler_interpreter import check_graph
from nnx_nnscaler.trace import TraceError, trace_forward
from nnx_nnscaler.trace.guard import CommunicationError, collectives_refused, running

X = torch.ones(4, 8)


class Around(nn.Module):
    """A function of tensors in a submodule between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), Calls(function), nn.Linear(8, 8)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Calls(nn.Module):
    """Calls a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


# --- collectives --------------------------------------------------------------------------------


@pytest.fixture
def world():
    """A process group of one rank; the tests need no answer from others."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduced(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def gathered(x):
    out = [torch.empty_like(x)]
    dist.all_gather(out, x)
    return out[0]


def waited(x):
    dist.barrier()
    return x


def seen_in_python(x):
    if float(x.sum()) > 1e6:
        return x
    return reduced(x)


def functionally(x):
    if float(x.sum()) > 1e6:
        return x
    return functional.all_reduce(x, "sum", dist.group.WORLD)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "function", [reduced, gathered, waited, torch.distributed.nn.all_reduce, seen_in_python, functionally]
)
def test_a_forward_that_communicates_is_refused_with_its_line(world, function):
    with pytest.raises(TraceError, match="communicates with other ranks") as error:
        trace_forward(Around(function), (X,))
    assert ".py:" in str(error.value)


def test_a_collective_that_could_be_traced_is_refused_too(world):
    module = Around(lambda x: functional.all_reduce(x, "sum", dist.group.WORLD))
    with pytest.raises(TraceError, match="communicates with other ranks"):
        trace_forward(module, (X,))


def test_collectives_work_again_afterwards(world):
    with pytest.raises(TraceError):
        trace_forward(Around(reduced), (X,))
    assert torch.equal(reduced(X), X)


def test_other_threads_may_communicate_meanwhile(world):
    seen = []
    thread = threading.Thread(target=lambda: seen.append(reduced(X)))
    with collectives_refused():
        thread.start()
        thread.join()
        with pytest.raises(CommunicationError):
            reduced(X)
    assert torch.equal(seen[0], X)


# --- hooks --------------------------------------------------------------------------------------


def branching(x):
    return x * 2 if float(x.sum()) > 0 else x


def test_no_hook_is_called_and_all_are_there_afterwards():
    module, seen = Around(branching), []

    def hook(*_):
        seen.append(1)

    for submodule in (module.first, module.inner):
        submodule.register_forward_pre_hook(hook)
        submodule.register_forward_hook(hook)
        submodule.register_full_backward_hook(hook)
    handle = torch_module.register_module_forward_hook(hook)
    try:
        graph = trace_forward(module, (X,))
    finally:
        handle.remove()
    assert not seen
    assert sorted(graph.kept) == ["first", "inner"]
    module(X).sum().backward()
    assert len(seen) == 6


def test_a_hook_that_the_forward_cannot_do_without_is_a_reason_to_run_whole():
    module = Around(lambda x: (x, x))
    module.inner.register_forward_hook(lambda _, args, result: result[0])
    with pytest.raises(TraceError, match="fails on the sample"):
        trace_forward(module, (X,))


# --- grad mode ----------------------------------------------------------------------------------


def asking(x):
    return x * 2 if torch.is_grad_enabled() else x * 3


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_code_sees_the_grad_mode_of_its_caller(around):
    module = Around(asking)
    with around():
        gradients = torch.is_grad_enabled()
        graph = trace_forward(module, (X.clone(),))
    (factor,) = [op.args[1] for op in graph.ops if op.target == "aten.mul.Tensor"]
    assert factor == (2 if gradients else 3)
    assert {graph.meta(op.name).differentiable for op in graph.ops} == {gradients}
    assert not any("detach" in op.target for op in graph.ops)
    with around():
        check_graph(graph, module, (torch.randn(6, 8),))


def test_submodules_that_stay_whole_see_it_too():
    seen = Mock()  # a list would be put back

    def noting(x):
        seen(torch.is_grad_enabled())
        return branching(x)

    with torch.no_grad():
        graph = trace_forward(Around(noting), (X,))
    assert list(graph.kept) == ["inner"]
    assert {call.args for call in seen.call_args_list} == {(False,)}
    assert [op.context for op in graph.ops if op.target == "module"] == [""]


def test_gradients_that_only_the_forward_records_are_not_lost():
    def recording(x):
        with torch.enable_grad():
            return x * 2

    with torch.no_grad():
        graph = trace_forward(Around(recording), (X,))
    assert "records gradients where its caller does not" in graph.kept["inner"]
    assert trace_forward(Around(recording), (X,)).kept == {}


# --- Python's state -----------------------------------------------------------------------------


class Weighs(nn.Module):
    """Scales by a count, a random draw or the next value of an iterator."""

    steps = 0

    def __init__(self, weigh):
        super().__init__()
        self.layer, self.weigh = nn.Linear(8, 8), weigh
        self.numbers, self.total = np.zeros(1), torch.zeros(())
        self.rates, self.generator = iter([1, 2, 3]), np.random.default_rng(0)
        self.squares, self.own = (n * n for n in range(1, 9)), torch.Generator()

    def forward(self, x):
        return self.layer(x) * self.weigh(self)


def by_class(module):
    Weighs.steps += 1
    return Weighs.steps


def by_array(module):
    module.numbers += 1
    return float(module.numbers[0])


def by_tensor(module):
    module.total += 1
    return module.total


def by_iterator(module):
    return next(module.rates)


def by_numpy(module):
    return module.generator.random()


def by_environment(module):
    os.environ["NNX_TEST_STEPS"] = str(1 + int(os.environ.get("NNX_TEST_STEPS", "0")))
    return int(os.environ["NNX_TEST_STEPS"])


def by_generator(module):
    return next(module.squares)


def by_own_generator(module):
    return torch.rand((), generator=module.own)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("weigh", "reason"),
    [
        (by_class, "attribute 'steps'"),
        (by_array, "attribute 'numbers'"),
        (by_tensor, "writes in place into a tensor that is no buffer"),
        (by_iterator, "attribute 'rates'"),
        (by_numpy, "attribute 'generator'"),
        (by_environment, "attribute 'NNX_TEST_STEPS'"),
        (by_generator, "'squares', a generator"),
        (by_own_generator, "'own', a generator of random numbers"),
    ],
)
def test_a_forward_that_changes_pythons_state_is_refused_and_changes_nothing(weigh, reason):
    module, other = Weighs(weigh), Weighs(weigh)
    expected = float(weigh(other))
    Weighs.steps = 0
    os.environ.pop("NNX_TEST_STEPS", None)
    with pytest.raises(TraceError, match=reason):
        trace_forward(module, (X,))
    assert float(weigh(module)) == expected
    Weighs.steps = 0
    os.environ.pop("NNX_TEST_STEPS", None)


def clip(layer):
    with torch.no_grad():
        layer.weight.clamp_(-0.01, 0.01)


def normalize_data(layer):
    layer.weight.data = nn.functional.normalize(layer.weight.data, dim=1)


def clip_data(layer):
    layer.weight.data.clamp_(-0.01, 0.01)


def renormalize(layer):
    nn.functional.embedding(torch.arange(8), layer.weight, max_norm=0.1)


class Writing(nn.Linear):
    """A layer that writes into its own weight, and branches on a tensor's value, which no trace can hold."""

    def __init__(self, write):
        super().__init__(8, 8)
        self.write = write

    def forward(self, x):
        self.write(self)
        return super().forward(x) if bool(x.sum() > -1e9) else x


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("write", [clip, normalize_data, clip_data, renormalize])
def test_running_a_layer_on_the_sample_leaves_its_weights_and_their_versions(write):
    module = nn.Sequential(nn.Linear(8, 8), Writing(write), nn.Linear(8, 8))
    flat = torch.cat([parameter.detach().flatten() for parameter in module[1].parameters()])
    start = 0
    for parameter in module[1].parameters():  # as views of one memory
        parameter.data = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    before = {name: (p.clone(), p._version, p.data_ptr()) for name, p in module.named_parameters()}
    assert trace_forward(module, (X,)).kept
    for name, parameter in module.named_parameters():
        content, version, place = before[name]
        assert torch.equal(parameter, content), name
        assert (parameter._version, parameter.data_ptr()) == (version, place), name


def test_a_sparse_parameter_has_no_storage_to_restore():
    module = nn.Sequential(nn.Linear(8, 8), Writing(clip), nn.Linear(8, 8))
    module[1].lookup = nn.Parameter(torch.eye(8).to_sparse(), requires_grad=False)
    with running(module):
        clip(module[1])
    assert module[1].weight.abs().max() > 0.01
