"""Convolutional models and users' own operators through trace, plan and program."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nnx_nnscaler import register_op
from nnx_nnscaler.parity import compare
from nnx_nnscaler.plan.planning import plan_program
from nnx_nnscaler.rules.registry import strategies_of, unsupported_message, unsupported_operators
from nnx_nnscaler.trace import trace_forward

CLASSES = 8


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.wide = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.wide_norm = nn.BatchNorm2d(32, affine=False)
        self.depthwise = nn.Conv2d(32, 32, 3, groups=32, padding=1)
        self.groups = nn.GroupNorm(8, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(16 * 4, CLASSES)

    def forward(self, images, labels):
        x = self.norm(self.stem(images)).relu()
        x = self.wide_norm(self.wide(x)).relu()
        x = self.pool(self.up(self.groups(self.depthwise(x))))
        x = F.pad(F.interpolate(x, scale_factor=2.0, mode="bilinear"), (1, 1, 1, 1), mode="reflect")
        x = F.adaptive_avg_pool2d(x, 2).flatten(1)
        return F.cross_entropy(self.head(x), labels)


@register_op("* d^, d -> * d")
def root_mean_square(x, scale, eps: float = 1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale


@register_op("b t k+, n k -> b t n")
def product(x, weight):
    return x @ weight.T


@register_op("b t (h d^), ? -> b t (h d)")
def rotated(x, h: int):
    return x.unflatten(-1, (h, -1)).roll(1, -1).flatten(-2)


class WithOwnOperators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))
        self.first = nn.Linear(16, 32)
        self.second = nn.Parameter(torch.randn(16, 32))

    def forward(self, x):
        x = root_mean_square(x, self.scale)
        return product(rotated(self.first(x), 4).relu(), self.second).square().mean()


def images():
    torch.manual_seed(3)
    return torch.randn(8, 4, 16, 16, dtype=torch.float64), torch.randint(0, CLASSES, (8,))


@functools.cache
def convolutional(training: bool):
    """The model and its graph."""
    torch.manual_seed(0)
    module = Convolutional().double().train(training)
    return module, trace_forward(module, images(), {})


@functools.cache
def with_own_operators():
    """The model and its graph."""
    torch.manual_seed(0)
    module = WithOwnOperators().double()
    return module, trace_forward(module, (torch.randn(8, 4, 16, dtype=torch.float64),), {})


COSTLY = ("conv", "batch_norm", "group_norm", "pool", "upsample", "linear", "pad", "nnx_user")


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False])
def test_every_costly_operator_of_a_convolutional_model_can_be_split(training: bool) -> None:
    _, graph = convolutional(training)
    for op in graph.ops:
        if any(name in op.target for name in COSTLY):
            assert len(strategies_of(op, graph, 4)) > 2, op.target
    assert unsupported_message(graph, 4) == ""


@pytest.mark.quick(every=24, first=1)
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("policy", ["data", "tp", "zero", "autodist"])
@pytest.mark.parametrize("training", [True, False])
def test_a_convolutional_model_equals_one_process(training: bool, policy: str, size: int) -> None:
    module, graph = convolutional(training)
    plan = plan_program(graph, size=size, policy=policy)
    parity = compare(module, graph, plan, (images(), {}))
    assert parity.error < 1e-12, parity.worst
    whole = [
        name
        for name, strategy in parity.plan.choices.items()
        if strategy.is_replicated and any(costly in name for costly in COSTLY)
    ]
    # The solver may leave the last, small ones whole; where a policy says how to split, all are split.
    assert policy == "autodist" or not whole


@pytest.mark.quick(every=8, first=2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("policy", ["data", "tp", "autodist"])
def test_a_model_with_operators_of_its_own_equals_one_process(policy: str, size: int) -> None:
    module, graph = with_own_operators()
    plan = plan_program(graph, size=size, policy=policy)
    call = (torch.randn(4, 4, 16, dtype=torch.float64),)  # another batch than the one that was traced
    parity = compare(module, graph, plan, (call, {}))
    assert parity.error < 1e-12, parity.worst
    own = {n: s.name for n, s in parity.plan.choices.items() if "register_op" in n or "test_conv" in n}
    assert len(own) == 3
    if policy == "data":
        assert list(own.values()) == ["*0", "b", "b"]
    if policy == "tp":
        assert list(own.values())[1:] == ["h", "k"]
        assert f", {4 // size})" in parity.source


def test_operators_that_nobody_can_split_are_named_once_with_their_lines() -> None:
    class Odd(nn.Module):
        def forward(self, x):
            first = torch.linalg.matrix_exp(x @ x.T)
            return first + torch.linalg.matrix_exp(first) + torch.histc(x, bins=8).sum()

    graph = trace_forward(Odd(), (torch.randn(8, 8),), {})
    found = unsupported_operators(graph, 2)
    assert set(found) == {"aten.linalg_matrix_exp.default", "aten.histc.default"}
    assert len(found["aten.linalg_matrix_exp.default"]) == 2
    assert all("test_convolutional_models.py" in line for lines in found.values() for line in lines)
    message = unsupported_message(graph, 2)
    assert "aten.histc.default: " in message
    assert "register_op" in message
