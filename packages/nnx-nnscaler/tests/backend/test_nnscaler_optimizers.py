"""Float32 masters: their values and their state."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from nnx_nnscaler.masters import Masters


def test_masters_keep_updates_that_half_precision_rounds_away():
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    plain = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1e-3)
    masters = Masters([weight])
    for _ in range(10):
        weight.grad = torch.ones(3, dtype=torch.bfloat16)
        with masters.of(optimizer).stepping():
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
        with masters.of(optimizer).user_code():
            seen.append(weight.dtype)
            weight.grad = torch.ones(3, dtype=torch.float16)
        return 1.0

    with masters.of(optimizer).stepping():
        optimizer.step(closure)
    assert seen == [torch.float16]
    assert torch.equal(weight, torch.full((3,), 0.5, dtype=torch.float16))
    with pytest.raises(ZeroDivisionError), masters.of(optimizer).stepping():
        raise ZeroDivisionError
    assert weight.dtype == torch.float16


def test_masters_take_over_a_weight_that_was_changed_between_steps():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    masters = Masters([weight])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with torch.no_grad():
        weight[0] = 5.0
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    with masters.of(optimizer).stepping():
        optimizer.step()
    assert masters.copies[weight].tolist() == [4.0, 0.0]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_may_drop_or_change_gradients_of_masters(set_to_none):
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    masters, optimizer = Masters([weight]), torch.optim.SGD([weight])
    weight.grad = torch.ones(2, dtype=torch.bfloat16)
    with masters.of(optimizer).stepping():
        optimizer.zero_grad(set_to_none=set_to_none)
        with masters.of(optimizer).user_code():
            weight.sum().backward()
        weight.grad.mul_(0.5)
    assert weight.grad.dtype == torch.bfloat16
    assert weight.grad.tolist() == [0.5, 0.5]


def test_masters_of_several_models_come_and_go_one_by_one():
    one, two = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    masters = Masters([one])
    copy = masters.copies[one]
    masters.add([one, two])
    assert masters.copies[one] is copy and set(masters.copies) == {one, two}
    masters.discard([one])
    assert set(masters.copies) == {two}


def test_masters_take_over_a_weight_that_was_changed_before_a_save():
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    masters = Masters([weight])
    with torch.no_grad():
        weight[0] = 5.0
    masters.take_over()
    assert masters.copies[weight].tolist() == [5.0, 1.0]


def test_masters_leave_float32_alone_and_publish_what_was_loaded():
    half, single = nn.Parameter(torch.ones(2, dtype=torch.float16)), nn.Parameter(torch.ones(2))
    masters = Masters([half, single])
    assert list(masters.copies) == [half]
    masters.copies[half].fill_(2.0)
    masters.publish()
    assert half.tolist() == [2.0, 2.0]


class Operators(TorchDispatchMode):
    """Notes which operators compute: views and allocations do not."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_the_number_of_kernels_for_masters_does_not_grow_with_the_number_of_parameters():
    counted = []
    for count in (2, 40):
        parameters = [
            nn.Parameter(torch.randn(3, 4).to(dtype))
            for _ in range(count)
            for dtype in (torch.float16, torch.bfloat16)
        ]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        masters, optimizer = Masters(parameters), torch.optim.SGD(parameters)
        with Operators() as operators, masters.of(optimizer).stepping():
            pass
        counted.append(operators.names)
    assert counted[0] == counted[1]
    assert len(counted[0]) <= 2 * 8  # groups: two dtypes


def one_by_one(half, copy):
    """Return the float32 master of a half-precision parameter."""
    return torch.where(copy.to(half.dtype) == half, copy, half.float())


def test_masters_have_the_bits_of_copies_that_are_made_one_by_one():
    torch.manual_seed(0)
    shapes = [(), (0,), (0, 3), (5,), (4, 3), (2, 3, 4, 5)]
    dtypes = (torch.float16, torch.bfloat16)
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes for dtype in dtypes]
    parameters[-1].data = parameters[-1].data.to(memory_format=torch.channels_last)
    parameters[-3].data = torch.randn(3, 4).bfloat16().t()
    embedding = nn.Embedding(6, 2, sparse=True, dtype=torch.bfloat16)
    parameters.append(embedding.weight)
    parameters.append(nn.Parameter(torch.randn(2, dtype=torch.complex64)))
    masters, optimizer = Masters(parameters), torch.optim.SGD(parameters, lr=0.1)
    for value, special in zip(parameters[6].data, (0.0, -0.0, torch.inf, torch.nan, 1e-7), strict=True):
        value.fill_(special)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    embedding.weight.grad = None
    embedding(torch.tensor([1, 4, 1])).sum().backward()
    copies = {p: copy.clone().add_(1e-6) for p, copy in masters.copies.items()}
    for parameter, copy in copies.items():
        masters.copies[parameter].copy_(copy)
    expected = {p: one_by_one(p.data, copy) for p, copy in copies.items()}
    halves, gradients = {p: p.data for p in parameters}, {p: p.grad for p in parameters}
    with masters.of(optimizer).stepping():
        for p, copy in expected.items():
            torch.testing.assert_close(p.data, copy, rtol=0, atol=0, equal_nan=True)
            assert p.stride() == halves[p].stride()
            assert p.grad.dtype == torch.float32 and p.grad.is_sparse == gradients[p].is_sparse
            assert torch.equal(p.grad.to_dense(), gradients[p].float().to_dense())
        optimizer.step()
        stepped = {p: p.data.clone() for p in parameters}
    for p in parameters:
        assert p.data.data_ptr() == halves[p].data_ptr() and p.grad is gradients[p]
        torch.testing.assert_close(p.data, stepped[p].to(p.dtype), rtol=0, atol=0, equal_nan=True)


def test_only_the_masters_of_the_optimizer_that_steps_are_lent():
    first, second = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    masters = Masters([first, second])
    with masters.of(torch.optim.SGD([second])).stepping():
        assert (first.dtype, second.dtype) == (torch.bfloat16, torch.float32)
