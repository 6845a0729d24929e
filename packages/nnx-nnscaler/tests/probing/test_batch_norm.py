"""Sharded batch norm: statistics over the unit; running statistics are equal on all ranks, updated once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from jobs.nnscaler_one_op import f, one_op
from jobs.nnscaler_rule_oracle import check_strategy
from nnx_core.communicator import Communicator
from nnx_nnscaler.rules.registry import strategies_of
from nnx_nnscaler.runtime.functions import Runtime
from nnx_nnscaler.thread_ranks import run_as_ranks

EPS = 1e-5


def batch_norm(*operands, training: bool):
    return one_op("aten.batch_norm.default", *operands, training, 0.1, EPS, False)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("graph_and_op", "names"),
    [
        (batch_norm(f(4, 8, 4, 3), f(8), f(8), None, None, training=True), {"batch", "channels", "dim2"}),
        (batch_norm(f(4, 8), f(8), f(8), None, None, training=True), {"batch", "channels"}),
        (batch_norm(f(4, 8, 4), None, None, None, None, training=True), {"batch", "channels", "dim2"}),
        (batch_norm(f(4, 8, 4), f(8), f(8), f(8), f(8), training=False), {"batch", "channels", "dim2"}),
    ],
)
def test_every_split_computes_what_the_whole_does(graph_and_op, names: set[str], size: int) -> None:
    graph, op = graph_and_op
    strategies = strategies_of(op, graph, size)
    assert {s.name for s in strategies[1:]} == names
    for strategy in strategies:
        # In evaluation the running variance has to be positive.
        draws = ["normal", "unit"] if op.args[5] else ["unit"]
        assert not check_strategy(op, graph, strategy, size, draws=draws)


def whole(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, torch.nn.BatchNorm2d]:
    torch.manual_seed(1)
    module = torch.nn.BatchNorm2d(8, momentum=0.3).to(dtype)
    torch.nn.init.normal_(module.weight)
    torch.nn.init.normal_(module.bias)
    leaf = x.clone().requires_grad_()
    cotangent = torch.randn_like(x)
    module(leaf).backward(cotangent)
    return leaf.grad, cotangent, leaf, module


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("how", ["batch", "channels"])
def test_training_equals_one_process_with_running_statistics(how: str, size: int) -> None:
    x = (
        torch.randn(8, 8, 3, 3, dtype=torch.float64) * 3 + 100
    )  # far from zero, where a sum of squares is lost
    gradient, cotangent, _, module = whole(x, torch.float64)
    dim = 0 if how == "batch" else 1

    def rank_of(unit: Communicator):
        rt = Runtime(unit)
        part = rt.part(x, dim).requires_grad_()
        weight, bias = (p.detach().clone() for p in (module.weight, module.bias))
        if how == "channels":
            weight, bias = rt.part(weight, 0), rt.part(bias, 0)
        weight.requires_grad_(), bias.requires_grad_()
        mean, variance = torch.zeros(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype)
        function = rt.batch_norm_over_unit if how == "batch" else rt.batch_norm_of_channels
        function(part, weight, bias, mean, variance, 0.3, EPS).backward(rt.part(cotangent, dim))
        return part.grad, weight.grad, bias.grad, mean, variance

    ranks = run_as_ranks(size, rank_of)
    torch.testing.assert_close(torch.cat([r[0] for r in ranks], dim), gradient, rtol=0, atol=1e-12)
    for index, parameter in ((1, module.weight), (2, module.bias)):
        parts = [r[index] for r in ranks]
        found = sum(parts) if how == "batch" else torch.cat(parts)
        torch.testing.assert_close(found, parameter.grad, rtol=1e-12, atol=1e-12)
    for _, _, _, mean, variance in ranks:
        assert torch.equal(mean, ranks[0][3])
        assert torch.equal(variance, ranks[0][4])
        torch.testing.assert_close(mean, module.running_mean, rtol=1e-13, atol=0)
        torch.testing.assert_close(variance, module.running_var, rtol=1e-13, atol=0)


def test_statistics_of_half_precision_inputs_are_in_single_precision() -> None:
    x = torch.randn(8, 8, 4, 4).bfloat16()
    mean, variance = torch.zeros(8), torch.ones(8)

    def rank_of(unit: Communicator) -> Tensor:
        rt = Runtime(unit)
        own = [mean.clone(), variance.clone()]
        part = rt.part(x, 0).requires_grad_()
        result = rt.batch_norm_over_unit(part, torch.ones(8), torch.zeros(8), *own, 1.0, EPS)
        result.float().square().sum().backward()
        assert part.grad.dtype == torch.bfloat16
        assert result.dtype == torch.bfloat16
        return own[0]

    for found in run_as_ranks(2, rank_of):
        torch.testing.assert_close(found, x.float().mean((0, 2, 3)))


def test_running_statistics_are_left_alone_in_evaluation() -> None:
    graph, op = batch_norm(f(4, 8, 4), f(8), f(8), f(8), f(8), training=False)
    assert not any(strategy.call for strategy in strategies_of(op, graph, 2))


def test_a_second_derivative_is_refused() -> None:
    def rank_of(unit: Communicator) -> None:
        x = torch.randn(4, 2, requires_grad=True)
        result = Runtime(unit).batch_norm_over_unit(x, None, None, None, None, 0.1, EPS)
        (gradient,) = torch.autograd.grad(result.square().sum(), x, create_graph=True)
        gradient.sum().backward()

    with pytest.raises(RuntimeError, match="once_differentiable"):
        run_as_ranks(2, rank_of)
