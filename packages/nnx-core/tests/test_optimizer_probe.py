"""The optimizer probe finds the scope of one element's update: the element, the parameter or more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from nnx_core.optimizers.failed_backward import FailedBackward
from nnx_core.optimizers.optimizer_probe import dependence, try_optimizer

ELEMENTWISE = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "Adagrad": {},
    "RMSprop": {"centered": True},
    "Rprop": {},
    "RAdam": {},
    "ASGD": {},
    "Adamax": {},
    "SparseAdam": {},
}


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes or [(64, 48), (64,), (8, 4, 3, 3)]]


class OwnStep(Optimizer):
    """Each step adds the direction of a parameter's gradient; subclasses say which.

    A group with ``plain=True`` is stepped along the gradient itself.
    """

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "plain": False})
        self.steps = 0

    def direction(self, p):
        return p.grad

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad if group["plain"] else self.direction(p), alpha=-group["lr"])
        return loss


class Signed(OwnStep):
    def direction(self, p):
        return p.grad.sign()


class Normalized(OwnStep):
    def direction(self, p):
        return p.grad / p.grad.norm()


class LargeMatricesNormalized(OwnStep):
    def direction(self, p):
        return p.grad / p.grad.norm() if p.ndim == 2 and min(p.shape) >= 32 else p.grad


class KernelsNormalized(OwnStep):
    def direction(self, p):
        return p.grad / p.grad.norm() if p.ndim == 4 else p.grad


class InBlocksOfEight(OwnStep):
    def direction(self, p):
        blocks = p.grad.reshape(-1, 8)
        return (blocks / blocks.norm(dim=1, keepdim=True)).reshape(p.shape)


class NormOfAll(OwnStep):
    def direction(self, p):
        return p.grad / sum(q.grad.square().sum() for g in self.param_groups for q in g["params"])


class SinglePrecisionInside(OwnStep):
    def direction(self, p):
        return torch.eye(len(p)) @ p.grad.flatten(1) @ torch.eye(p[0].numel()) / p.grad.norm()


class EveryTenth(OwnStep):
    def __init__(self, params):
        super().__init__(params)
        self.every = 10

    def direction(self, p):
        return p.grad / p.grad.norm() if self.steps % self.every == 0 else p.grad


class Perturbing(OwnStep):
    """SAM in small: the gradient counts that the closure finds at another point."""

    @torch.no_grad()
    def step(self, closure=None):
        closure()
        away = [p.grad / p.grad.norm() for p in self.param_groups[0]["params"]]
        for p, by in zip(self.param_groups[0]["params"], away, strict=True):
            p.add_(by)
        closure()
        for p, by in zip(self.param_groups[0]["params"], away, strict=True):
            p.sub_(by).sub_(p.grad, alpha=0.1)


class Wrapping(Optimizer):
    """Holds another optimizer over the same groups, as Lookahead and many SAMs do."""

    def __init__(self, params, inner):
        super().__init__(params, {})
        self.inner = inner(self.param_groups)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


class Gathering(OwnStep):
    def direction(self, p):
        dist.all_reduce(p.grad)
        return p.grad


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.full
def test_optimizers_of_single_elements_are_found_and_left_alone():
    random_state = torch.get_rng_state()
    for name, options in ELEMENTWISE.items():
        optimizer = getattr(torch.optim, name)(parameters(), **options)
        state = {key: {**value} for key, value in optimizer.state.items()}
        assert dependence(optimizer) == "element", name
        assert {key: {**value} for key, value in optimizer.state.items()} == state
        assert all(torch.equal(p, torch.ones_like(p)) for p in optimizer.param_groups[0]["params"])
    own = Signed(parameters())
    assert dependence(own) == "element"
    assert own.steps == 0
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    "kind", [Normalized, LargeMatricesNormalized, KernelsNormalized, InBlocksOfEight, EveryTenth]
)
def test_optimizers_of_whole_parameters_are_found_also_where_they_ask_for_sizes_and_steps(kind):
    assert dependence(kind(parameters())) == "parameter"


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("kind", [NormOfAll, Perturbing, torch.optim.LBFGS, Gathering])
def test_optimizers_of_the_whole_model_are_found(kind):
    assert dependence(kind(parameters())) == "model"
    assert try_optimizer(kind(parameters())).communicates is (kind is Gathering)


def test_parameters_without_elements_say_nothing_about_an_optimizer():
    optimizer = torch.optim.AdamW(parameters((4, 3), (0, 3), (0,)))
    assert try_optimizer(optimizer, shape_of=lambda p: tuple(p.shape)).dependence == "element"


def test_an_optimizer_that_makes_single_precision_tensors_can_be_tried():
    assert dependence(SinglePrecisionInside(parameters((8, 4), (32, 16)))) == "parameter"


def test_every_group_is_looked_at_with_its_own_options_and_shapes():
    groups = [{"params": parameters((4,)), "plain": True}, {"params": parameters((4, 4))}]
    assert try_optimizer(Normalized(groups)).groups == ("element", "parameter")
    assert try_optimizer(torch.optim.Muon(parameters((4, 4), (64, 48)))).dependence == "parameter"
    vectors = LargeMatricesNormalized(parameters((4096,)))  # perhaps a matrix, flattened by an engine
    assert dependence(vectors) == "parameter"
    assert try_optimizer(vectors, shape_of=lambda p: p.shape).dependence == "element"


def test_optimizers_inside_of_others_and_rates_of_a_warm_up_are_seen_through():
    assert dependence(Wrapping(parameters(), torch.optim.AdamW)) == "element"
    assert dependence(Wrapping(parameters(), Normalized)) == "parameter"
    for kind, expected in ((torch.optim.AdamW, "element"), (Normalized, "parameter")):
        optimizer = kind(parameters(), lr=torch.tensor(0.1))
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
        assert dependence(optimizer) == expected


class Counting(OwnStep):
    elements = 0

    def direction(self, p):
        Counting.elements += p.numel()
        return p.grad.sign()


@pytest.mark.full
def test_a_trial_of_many_groups_steps_on_few_elements():
    groups = [{"params": parameters((768, 768)), "lr": 1e-3 * index} for index in range(200)]
    assert dependence(Counting(groups)) == "element"
    assert 0 < Counting.elements < 3 * 768 * 768  # that of three of the 200 groups


def test_a_step_that_zeroes_gradients_zeroes_none_in_a_trial() -> None:
    class ZeroesInStep(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            loss = super().step(closure)
            self.zero_grad()
            return loss

    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    optimizer = ZeroesInStep([parameter], lr=0.1)
    FailedBackward().watch(optimizer, optimizer)
    assert dependence(optimizer) == "element"
    assert parameter.grad is not None
