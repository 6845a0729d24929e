"""What float32 masters keep."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nnx_nnscaler.optimizers import Masters


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
