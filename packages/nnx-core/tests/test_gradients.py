"""Clipping and unscaling use few kernels for any number of gradients, and are right for every kind."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nnx_core.optimizers.gradients import (
    Gradient,
    clip_gradients_by_norm,
    clip_gradients_by_value,
    unscale_gradients,
)

CPU = torch.device("cpu")
HALF = torch.tensor(0.5)


class Operators(TorchDispatchMode):
    """Counts the operators that would be kernels on a card; a ``_foreach_`` operator is one."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def of_every_kind() -> list[Gradient]:
    torch.manual_seed(0)
    locals_ = [
        torch.randn(3, 4),
        torch.randn(5).to(torch.bfloat16),
        torch.randn(2, 2, dtype=torch.float64),
        torch.randn(4, dtype=torch.complex64),
        torch.empty(0),
        torch.randn(6, 3).T,
    ]
    return [Gradient(local, replicas) for local, replicas in zip(locals_, [1, 2, 2, 1, 1, 2], strict=True)]


@pytest.mark.parametrize("number", [20, 400])
def test_clipping_and_unscaling_take_few_kernels_however_many_gradients(number: int) -> None:
    gradients = [Gradient(torch.randn(3, i % 5 + 1), 1 + i % 2) for i in range(number)]
    with Operators() as operators:
        unscale_gradients(gradients, HALF, CPU)
        clip_gradients_by_norm(gradients, max_norm=1.0, device=CPU)
        clip_gradients_by_value(gradients, 0.01)
    assert operators.count.total() <= 40, operators.count


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_counts_each_element_once(order: float) -> None:
    gradients = of_every_kind()
    norms = [torch.linalg.vector_norm(g.local.abs().double(), order) for g in gradients if g.local.numel()]
    replicas = [g.replicas for g in gradients if g.local.numel()]
    before = [g.local.clone() for g in gradients]

    total = clip_gradients_by_norm(gradients, max_norm=0.5, norm_type=order, device=CPU)

    shares = [norm**order / count for norm, count in zip(norms, replicas, strict=True)]
    expected = max(norms) if math.isinf(order) else sum(shares) ** (1 / order)
    assert float(total) == pytest.approx(float(expected), rel=1e-6)
    for gradient, was in zip(gradients, before, strict=True):
        torch.testing.assert_close(gradient.local, was * (0.5 / float(total)), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("where", [0, 1, 2, 3, 5])
def test_unscaling_notices_one_bad_value_of_any_kind(where: int, bad: float) -> None:
    gradients = of_every_kind()
    assert unscale_gradients(gradients, HALF, CPU).tolist() == [0.0]
    gradients[where].local.reshape(-1)[:1] = bad
    if not gradients[where].local.is_contiguous():
        gradients[where].local[0, 0] = bad
    assert unscale_gradients(gradients, HALF, CPU).tolist() == [1.0]


def test_unscaling_reads_sparse_and_huge_complex_gradients_as_they_are() -> None:
    def sparse(*values: float) -> Tensor:
        indices = torch.zeros(1, len(values), dtype=torch.long)
        return torch.sparse_coo_tensor(indices, torch.tensor(values), (4,), check_invariants=True)

    gradient = Gradient(sparse(2.0, 4.0), 1)
    assert unscale_gradients([gradient, Gradient(sparse(), 1)], HALF, CPU).tolist() == [0.0]
    assert gradient.local.to_dense().tolist() == [3.0, 0.0, 0.0, 0.0]
    assert unscale_gradients([Gradient(sparse(math.inf), 1)], HALF, CPU).tolist() == [1.0]
    huge = torch.tensor([3e38 + 3e38j])  # its magnitude is no float32, its parts are
    assert unscale_gradients([Gradient(huge, 1)], torch.tensor(1.0), CPU).tolist() == [0.0]
    assert unscale_gradients([], HALF, CPU).tolist() == [0.0]
