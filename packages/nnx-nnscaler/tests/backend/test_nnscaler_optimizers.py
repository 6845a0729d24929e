"""Which optimizers are found to be elementwise, and what float32 masters keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from nnx.errors import UnsupportedError
from nnx_nnscaler.optimizers import Masters, is_elementwise, refuse_unless_elementwise

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
}


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(4, 4))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_optimizer_of_single_elements_is_allowed_and_left_alone(name):
    optimizer = getattr(torch.optim, name)([parameter()], **ELEMENTWISE[name])
    before = {key: dict(value) for key, value in optimizer.state.items()}
    random_state = torch.get_rng_state()
    assert is_elementwise(optimizer, optimizer.param_groups[0])
    assert {key: dict(value) for key, value in optimizer.state.items()} == before
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_an_optimizer_of_rows_or_norms_is_refused_on_parts_and_allowed_on_the_whole(name):
    optimizer = getattr(torch.optim, name)([parameter()])
    refuse_unless_elementwise(optimizer, lambda parameter: False)
    with pytest.raises(UnsupportedError, match=rf"{name} looks at more than one element.*nnscaler_dp"):
        refuse_unless_elementwise(optimizer, lambda parameter: True)


class Normalized(Optimizer):
    """Steps along the gradient divided by its norm, as many optimizers on the index do somewhere."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad / p.grad.norm(), alpha=-group["lr"])


class Signed(Normalized):
    def __init__(self, params):
        super().__init__(params)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad.sign(), alpha=-group["lr"])


def test_an_optimizer_of_your_own_is_tried_too():
    normalized, signed = Normalized([parameter()]), Signed([parameter()])
    assert not is_elementwise(normalized, normalized.param_groups[0])
    assert is_elementwise(signed, signed.param_groups[0])
    assert signed.steps == 0


def test_an_optimizer_whose_step_a_scheduler_wrapped_can_be_tried():
    optimizer = torch.optim.AdamW([parameter()], lr=torch.tensor(1e-3))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert is_elementwise(optimizer, optimizer.param_groups[0])


def test_masters_keep_updates_that_half_precision_rounds_away():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    plain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    masters = Masters([weight])
    for _ in range(10):
        weight.grad = torch.ones(3, dtype=torch.bfloat16)
        with masters.lent(optimizer):
            assert weight.dtype == torch.float32
            optimizer.step()
        plain.data.sub_(1e-3)
    assert weight.dtype == weight.grad.dtype == torch.bfloat16
    assert torch.equal(plain, torch.ones_like(plain))
    assert torch.allclose(masters.copies[weight], torch.full((3,), 0.99))
    assert torch.equal(weight, torch.full((3,), 0.99).bfloat16())


def test_masters_are_given_back_for_a_closure_and_when_the_step_fails():
    weight = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    masters = Masters([weight])
    seen = []

    def closure():
        with masters.taken_back():
            seen.append(weight.dtype)
            weight.grad = torch.ones(3, dtype=torch.float16)
        return 1.0

    with masters.lent(optimizer):
        optimizer.step(closure)
    assert seen == [torch.float16]
    assert torch.equal(weight, torch.full((3,), 0.5, dtype=torch.float16))
    with pytest.raises(ZeroDivisionError), masters.lent(optimizer):
        raise ZeroDivisionError
    assert weight.dtype == torch.float16


def test_masters_take_over_a_weight_that_was_changed_between_steps():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    masters = Masters([weight])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with torch.no_grad():
        weight[0] = 5.0
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    with masters.lent(optimizer):
        optimizer.step()
    assert masters.copies[weight].tolist() == [4.0, 0.0]


def test_masters_leave_float32_alone_and_publish_what_was_loaded():
    half, single = nn.Parameter(torch.ones(2, dtype=torch.float16)), nn.Parameter(torch.ones(2))
    masters = Masters([half, single])
    assert list(masters.copies) == [half]
    masters.copies[half].fill_(2.0)
    masters.publish()
    assert half.tolist() == [2.0, 2.0]
